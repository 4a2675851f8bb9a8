// The CUDA implementations of torch.ops.gvr_topk.indexer_topk_blocks and indexer_topk_in_blocks over
// libtorch's stable ABI. The schemas, the fake kernels and the CPU implementations are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

template <typename Arguments>
BlocksParams make_params(const Arguments& a, int64_t block_k) {
  BlocksParams p{};
  p.topk.logits = a.logits.data_ptr();
  p.topk.seq_lens = static_cast<const int32_t*>(a.seq_lens.data_ptr());
  p.topk.logits_stride = a.logits.stride(0);
  p.topk.width = static_cast<int32_t>(a.logits.size(1));
  p.topk.k = static_cast<int32_t>(a.k);
  p.topk.next_n = static_cast<int32_t>(a.next_n);
  p.topk.indices = static_cast<int32_t*>(a.out.data_ptr());
  p.topk.indices_stride = a.out.stride(0);
  p.topk.rows = static_cast<int32_t>(a.logits.size(0));
  p.topk.compress_ratio = static_cast<int32_t>(a.compress_ratio);
  p.topk.dtype = dtype_of(a.logits);
  // With one row per request, a length of the request and a length of the row are the same number.
  p.topk.row_lengths = a.next_n > 1 && a.seq_lens.size(0) == a.logits.size(0);
  p.topk.drop_masked = (a.flags & kFlagDropMasked) != 0;
  p.row_starts = pointer<int32_t>(a.row_starts);
  p.blocks_stride = a.blocks.stride(0);
  p.block_k = static_cast<int32_t>(block_k);
  p.ctas_per_row = 1;
  return p;
}

void check_launch(cudaError_t status, const BlocksParams& params, const CallTarget& target) {
  require(status == cudaSuccess, "gvr_topk: launch for ", params.topk.rows, " rows on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

// The launch that chooses the best blocks by their values, all but the last of a row's places. Each row of
// values is a whole number of 16-byte vectors.
TopkParams choice_of(const BlocksParams& p) {
  TopkParams choice{};
  choice.logits = p.values;
  choice.seq_lens = p.value_lengths;
  choice.logits_stride = p.values_stride;
  choice.width = static_cast<int32_t>(p.values_stride);
  choice.k = p.block_k - 1;
  choice.next_n = 1;
  choice.indices = p.chosen;
  choice.indices_stride = p.blocks_stride;
  choice.rows = p.topk.rows;
  choice.compress_ratio = 1;
  choice.dtype = Dtype::kFloat32;
  choice.drop_masked = p.topk.drop_masked;
  return choice;
}

// The plan of a decode launch without a hint.
Plan plan_of(const TopkParams& p, const CallTarget& target) {
  const PlanInput input{p.rows, p.width, p.k, p.dtype, Path::kNoHint, target.context.sm_count, target.arch};
  return runnable_plan(p, input, target);
}

// CTAs of each row in a launch that chooses blocks: as many as in decode. But where no positions are
// selected, a cluster is faster only if its CTAs spare the first one enough reading (measured on an H100 and
// an H200).
int32_t ctas_per_row(const TopkParams& p, const CallTarget& target) {
  const int32_t ctas = plan_of(p, target).ctas_per_row;
  const int64_t kilobytes = int64_t{p.width} * element_bytes(p.dtype) / 1024;
  return p.k == 0 && kilobytes <= (ctas == 2 ? 512 : 128) ? 1 : ctas;
}

// Chooses blocks of rows that are too wide for one launch. Of the three launches that take its place, each
// waits for the end of the one before it, and the last one reads the chosen blocks as if they were given.
void launch_wide(BlocksParams params, const CallTarget& target, bool pdl) {
  const int64_t rows = params.topk.rows, blocks = (params.topk.width + kBlockSize - 1) / kBlockSize;
  params.values_stride = (blocks + 3) / 4 * 4;
  const GivenTensor workspace = make_workspace(rows * (params.values_stride + 1), target.context.device);
  params.values = static_cast<float*>(workspace.data_ptr());
  params.value_lengths = reinterpret_cast<int32_t*>(params.values + rows * params.values_stride);
  const TopkParams choice = choice_of(params);
  const Plan plan = plan_of(choice, target);
  check_launch(launch_blocks(params, pdl, target.stream), params, target);
  check_launch(launch(choice, plan, true, target.stream), params, target);
  params.given = params.chosen;
  params.values = nullptr;
  check_launch(launch_blocks(params, true, target.stream), params, target);
}

template <typename Arguments>
void launch_checked(BlocksParams params, const Arguments& a) {
  if (params.topk.rows == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const bool pdl = (a.flags & kFlagPdl) != 0;
  if (params.given == nullptr) {
    if (!takes_one_blocks_launch(params.topk.width, target.arch)) return launch_wide(params, target, pdl);
    params.ctas_per_row = ctas_per_row(params.topk, target);
  }
  check_launch(launch_blocks(params, pdl, target.stream), params, target);
}

void choose_blocks(const BlocksArguments& a) {
  const CheckedOp op("indexer_topk_blocks");
  check_on_gpu(a.logits);
  check_arguments(a);
  BlocksParams params = make_params(a, a.block_k);
  params.chosen = static_cast<int32_t*>(a.blocks.data_ptr());
  launch_checked(params, a);
}

void select_in_blocks(const InBlocksArguments& a) {
  const CheckedOp op("indexer_topk_in_blocks");
  check_on_gpu(a.logits);
  check_arguments(a);
  BlocksParams params = make_params(a, a.blocks.size(1));
  // A table without columns has a null address, which would mean that the kernel chooses blocks. Nothing of
  // the table is read, so another address takes its place.
  const bool empty = a.blocks.size(1) == 0;
  params.given = empty ? params.topk.seq_lens : static_cast<const int32_t*>(a.blocks.data_ptr());
  launch_checked(params, a);
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_blocks", TORCH_BOX(&gvr_topk::BlocksArguments::call<&gvr_topk::choose_blocks>));
  m.impl("indexer_topk_in_blocks",
         TORCH_BOX(&gvr_topk::InBlocksArguments::call<&gvr_topk::select_in_blocks>));
}
