// The CUDA implementations of torch.ops.gvr_topk.indexer_topk_blocks and indexer_topk_in_blocks over
// libtorch's stable ABI. The schemas, the fake kernels and the CPU implementations are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

// The arguments that both ops have.
struct Arguments {
  const Tensor& logits;
  const Tensor& seq_lens;
  const Tensor& out;
  const Tensor& blocks;
  int64_t k;
  int64_t next_n;
  int64_t flags;
  int64_t compress_ratio;
  int64_t block_size;
};

void check_scores(const Arguments& a) {
  check_logits(a.logits);
  check_k(a.k);
  check(a.block_size == kBlockSize, "block_size: wanted ", kBlockSize, ", got ", a.block_size);
  check_lengths(a.logits, a.seq_lens, a.next_n, a.compress_ratio);
  check_results(a.out, "out", a.logits.get_device(), a.logits.size(0), a.k);
}

// Refuses arguments with undefined effect on the device, as gvr_topk/arguments.py does elsewhere.
void check_chosen(const Arguments& a, int64_t block_k) {
  check_scores(a);
  const int64_t width = a.logits.size(1);
  check(width <= kMaxBlocksWidth, "logits: wanted at most ", kMaxBlocksWidth, " columns, got ", width);
  check(blocks_hold_topk(a.k, block_k) && block_k <= kMaxChosenBlocks, "block_k: wanted more than k = ", a.k,
        " and at most ", kMaxChosenBlocks, ", got ", block_k);
  check_results(a.blocks, "blocks", a.logits.get_device(), a.logits.size(0), block_k, "block_k");
}

// Refuses arguments with undefined effect on the device, in a call that gives blocks.
void check_given(const Arguments& a) {
  check_scores(a);
  check_tensor(a.blocks, "blocks", a.logits.get_device(), ScalarType::Int, {a.logits.size(0), kAny});
  check(a.blocks.size(1) <= kMaxChosenBlocks, "blocks: wanted at most ", kMaxChosenBlocks, " columns, got ",
        a.blocks.size(1));
}

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

void launch_checked(const BlocksParams& params, const Arguments& a) {
  if (params.topk.rows == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const cudaError_t status = launch_blocks(params, (a.flags & kFlagPdl) != 0, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", params.topk.rows, " CTAs on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

void indexer_topk_blocks(Tensor logits, Tensor seq_lens, Tensor out, Tensor blocks, int64_t k,
                         int64_t block_k, int64_t next_n, int64_t flags, int64_t compress_ratio,
                         int64_t block_size) {
  const CheckedOp op("indexer_topk_blocks");
  const Arguments arguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size};
  check_chosen(arguments, block_k);
  BlocksParams params = make_params(arguments, block_k);
  params.chosen = static_cast<int32_t*>(blocks.data_ptr());
  launch_checked(params, arguments);
}

void indexer_topk_in_blocks(Tensor logits, Tensor seq_lens, Tensor blocks, Tensor out, int64_t k,
                            int64_t next_n, int64_t flags, int64_t compress_ratio, int64_t block_size) {
  const CheckedOp op("indexer_topk_in_blocks");
  const Arguments arguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size};
  check_given(arguments);
  BlocksParams params = make_params(arguments, blocks.size(1));
  // A table without columns has a null address, which would mean that the kernel chooses blocks. Nothing of
  // the table is read, so another address takes its place.
  params.given = blocks.size(1) > 0 ? static_cast<const int32_t*>(blocks.data_ptr()) : params.topk.seq_lens;
  launch_checked(params, arguments);
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_blocks", TORCH_BOX(&gvr_topk::indexer_topk_blocks));
  m.impl("indexer_topk_in_blocks", TORCH_BOX(&gvr_topk::indexer_topk_in_blocks));
}
