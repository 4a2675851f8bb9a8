// What a launch needs, as plain data. Kernels and host code share it; it knows nothing of torch.
#pragma once

#include <cstdint>

namespace gvr_topk {

enum class Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Columns of the optional statistics tensor; gvr_topk/contract.py names them for Python.
enum StatsColumn : int32_t {
  kStatPath = 0,
  kStatPasses = 1,
  kStatCandidates = 2,
  kStatSnap = 3,
  kStatHits = 4,
  kStatGuess = 5,
  kStatGuessHit = 6,
  kStatDone = 7,
  kStatColumns = 8,
};

// Floats of one slot of `guess_state`, which kernels read and write 16 bytes at a time.
constexpr int kStateFloats = 4;

// What a kernel needs first comes first: parameters are fetched 64 bytes at a time, and waited for. Of a
// kernel's, 48 bytes are fetched with the first of them, of which these are all but eight (cluster::Shape).
struct TopkParams {
  const void* logits;       // [rows, width], inner stride 1, `logits_stride` elements between rows
  const int32_t* seq_lens;  // [rows / next_n]
  int64_t logits_stride;
  float* guess_state;  // [num_slots, kStateFloats] or null: what one step leaves for the next (predictor.cuh)
  int32_t width;
  int32_t k;
  int32_t next_n;
  int32_t num_slots;
  int32_t* prior;  // [num_slots, k] or null: last result in, this result out
  int64_t prior_stride;
  const int32_t* row_slot;  // [rows] or null (slot = row / next_n); negative: no hint, no write-back
  int32_t prior_offset;     // added to every hinted position before use
  int32_t page_size;
  int32_t* indices;  // [rows, >= k], `indices_stride` elements between rows
  int64_t indices_stride;
  const int32_t* page_table;  // [rows / next_n, pages_per_request] or null
  int64_t page_table_stride;
  int32_t* stats;         // [rows, kStatColumns] or null
  int64_t* phase_clocks;  // [rows, 8] or null; written only by builds with GVR_PHASE_TIMING
  int32_t pages_per_request;
  int32_t rows;
  Dtype dtype;
  bool quantile_guess;  // four-phase kernel: T0 from the (1 - alpha) quantile instead of the mean
};

}  // namespace gvr_topk
