// Accepts drafts, from the first one of a request on, as long as they are the tokens drawn before them.
//
// Grid: a CTA of one warp for each request, whose lanes take 32 of its rows at a time. A row that is outside
// of all rows is not accepted, and not read.
#pragma once

#include "core/ids.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::verify {

static __global__ void __launch_bounds__(32) accept_drafts(const __grid_constant__ VerifyParams p) {
  const int64_t request = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  ptx::grid_take_over();
  int64_t first = p.starts != nullptr ? p.starts[request] : request * p.columns;
  ptx::keep(first);  // what is checked is what is used
  const int64_t end = p.starts != nullptr ? p.starts[request + 1] : first + p.columns;
  const int64_t rows = first < 0 ? 0 : min(end, p.rows) - first;
  int64_t length = 0;
  for (int64_t begin = 0; begin < p.columns; begin += 32) {
    const int64_t column = begin + lane, row = first + column;
    const bool inside = column < min(rows, int64_t{p.columns});
    const int64_t token = inside ? read_id(p.drawn, row) : -1;
    const bool is_right =
        column == 0 || (inside && read_id(p.drawn, row - 1) == read_id(p.draft_tokens, row));
    ptx::reconverge(ptx::unknown_zero());
    const uint32_t refused = __ballot_sync(0xffffffffu, token < 0 || !is_right);
    const int accepted = length < begin ? 0 : refused == 0 ? 32 : __ffs(refused) - 1;
    if (column < p.columns) {
      write_id(p.tokens, request * p.tokens_stride + column, lane < accepted ? token : -1);
    }
    length += accepted;
  }
  if (lane == 0) p.lengths[request] = static_cast<int32_t>(length);
}

}  // namespace gvr_topk::verify
