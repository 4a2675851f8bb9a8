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
  p.blocks_stride = a.blocks.stride(0);
  p.block_k = static_cast<int32_t>(block_k);
  return p;
}

template <typename Arguments>
void launch_checked(const BlocksParams& params, const Arguments& a) {
  if (params.topk.rows == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const cudaError_t status = launch_blocks(params, (a.flags & kFlagPdl) != 0, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", params.topk.rows, " CTAs on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
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
