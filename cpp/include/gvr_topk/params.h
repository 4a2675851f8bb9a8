// The parameters of a launch, as plain data. Kernels and host code share this header, which does not depend
// on torch.
#pragma once

#include <cstdint>

namespace gvr_topk {

enum class Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Columns of the optional statistics tensor, which has one row for each score row.
enum StatsColumn : int32_t {
  kStatReason = 0,      // HintReason (policy.h)
  kStatPasses = 1,      // verifications of a threshold or an interval
  kStatCandidates = 2,  // elements that reached refinement
  kStatSnap = 3,        // refinement iterations
  kStatHits = 4,   // hinted positions whose value is at or above the k-th, duplicates counted; -1: no hint.
                   // Without the first position where slots are claimed (core/output_writer.cuh).
  kStatGuess = 5,  // GuessSource
  kStatGuessHit = 6,  // whether the first guess was good
  kStatDone = 7,      // radix rounds after the guess; for the paper's kernel, its SearchEnd
  kStatColumns = 8,
};

// The origin of a row's first threshold or interval.
enum GuessSource : uint32_t {
  kGuessNone = 0,
  kGuessHint = 1,       // the values at the last step's positions (paper's kernel)
  kGuessRowSample = 2,  // a sample of the row
  kGuessZScore = 3,     // the state: how many deviations the k-th value stood from the mean of a sample
  kGuessValue = 4,      // the state: the last k-th value itself
};

// The step that ended the search of the paper's kernel for a threshold.
enum class SearchEnd : int32_t {
  kShort = 0,
  kGuess = 1,
  kSecant = 2,
  kTie = 3,
  kBisect = 4,
  kKey = 5,
  kTieKey = 6,
};

// Floats in one slot of the state. Kernels read and write a slot 16 bytes at a time.
constexpr int32_t kStateFloats = 4;
// The first float of a slot says what is known. A number within kStateMaxZScore of kStateZScoreOrigin is a
// z-score of the k-th value plus that origin. A number from 0 to 1 is the share of the hint at or above the
// k-th value (paper's kernel). -1 says that nothing is known, and other negative numbers are value windows of
// short rows.
constexpr float kStateUnknown = -1.0f;
constexpr float kStateZScoreOrigin = 64.0f;
constexpr float kStateMaxZScore = 16.0f;
constexpr float kStateValueOnly = 96.0f;  // a k-th value, but no z-score
constexpr float kStateInfinite = 112.0f;  // the k-th value was +inf or NaN
constexpr float kStateMasked = 128.0f;    // the k-th value was -inf

// The fields that kernels need first come first. Parameters are fetched 64 bytes at a time, and the first 56
// bytes share a fetch with the launch traits.
struct TopkParams {
  const void* logits;       // [rows, width], inner stride 1, `logits_stride` elements between rows
  const int32_t* seq_lens;  // [rows / next_n], or [rows] where `row_lengths`
  int64_t logits_stride;
  float* state;  // [num_slots, kStateFloats] or null: what a step leaves for the next (step_state.cuh)
  int32_t width;
  int32_t k;
  int32_t next_n;
  int32_t num_slots;
  int32_t* state_indices;  // [num_slots, k] or null: last result in, this result out
  int64_t state_indices_stride;
  const int32_t* row_slot;  // [rows] or null (slot = row / next_n); negative: no hint, no write-back
  int32_t hint_offset;      // added to every hinted position before use
  int32_t page_size;
  int32_t* indices;  // [rows, >= k], `indices_stride` elements between rows
  int64_t indices_stride;
  const int32_t* page_table;  // [rows / next_n, pages_per_request] or null
  int64_t page_table_stride;
  int32_t* slots;  // [rows, >= k] or null: cache slots go here, and to `indices` where this is null
  int64_t slots_stride;
  float* next_state;  // [rows, kStateFloats] or null: each row leaves its state here, not in its slot
  int32_t* counts;    // [rows] or null: how many items were written
  int32_t* stats;     // [rows, kStatColumns] or null
  int32_t pages_per_request;
  int32_t rows;
  int32_t compress_ratio;  // keys per score: lengths count keys, rows hold scores
  Dtype dtype;
  bool row_lengths;     // `seq_lens` holds the visible length of each row
  bool quantile_guess;  // paper's kernel: the first threshold is a quantile of the hinted values instead of
                        // their mean
  bool drop_masked;     // scores of -inf are not selected; the items missing at the end are -1
};

// The parameters of a launch of the prefill kernel, for which every row is a window of its own.
struct PrefillParams {
  const void* logits;         // [rows, width], inner stride 1, `logits_stride` elements between rows
  const int32_t* row_starts;  // [rows] first column of each window
  const int32_t* row_ends;    // [rows] column after the last one of each window
  int64_t logits_stride;
  int32_t width;
  int32_t k;
  int32_t rows;
  int32_t requests;            // the page table and the offsets have one row for each
  const int32_t* row_request;  // [rows] or null (request = row)
  const int32_t* offsets;      // [requests] or null: added to positions in `indices`
  int32_t* indices;            // [rows, >= k], `indices_stride` elements between rows
  int64_t indices_stride;
  const int32_t* page_table;  // [requests, pages_per_request] or null
  int64_t page_table_stride;
  int32_t* slots;  // [rows, >= k] or null: cache slots go here, and to `indices` where this is null
  int64_t slots_stride;
  int32_t* counts;  // [rows] or null: how many items were written
  int32_t* stats;   // [rows, kStatColumns] or null
  int32_t pages_per_request;
  int32_t page_size;
  int32_t runs_per_cta;  // runs of rows of each CTA
  int32_t bitmap_pairs;  // pairs of tiles, 1024 elements each, that the bitmap in shared memory covers
  Dtype dtype;
  bool predicts;  // whether the path allows a row to be predicted from the previous one
  bool lists;     // whether candidates are collected; otherwise radix rounds select from every row
};

// The parameters of a launch of the prefill kernel for slices. A row of the carry has k + 1 words: the number
// of its pairs in the lower half of the first, and in the upper one the least key of k pairs, or 0 if there
// are fewer; then pairs of a key, in the upper half, and a position in the row's window, in ascending order.
struct SliceParams {
  PrefillParams prefill;  // windows of the whole rows, and results where they end
  uint64_t* carry;        // [rows, k + 1]
  int32_t column;         // column of the whole rows that is the first of `logits`
  int32_t list_chunks;    // chunks of 32 listed elements that shared memory has room for
  bool ends;              // whether this slice ends the rows
};

// The parameters of a launch of a blocks kernel. The kernel chooses blocks of each row, or is given them, and
// selects in them; or it writes values of blocks, from which a launch of TopkParams chooses.
struct BlocksParams {
  TopkParams topk;  // scores, lengths, where positions go, and whether masked scores are dropped; k of 0 is
                    // for blocks alone
  const int32_t* row_starts;  // [rows] or null (0): column from which lengths, positions and blocks count
  const int32_t* given;       // [rows, block_k] blocks to select in, or null: the kernel chooses them
  int32_t* chosen;            // [rows, >= block_k] or null: where the chosen blocks go
  int64_t blocks_stride;      // elements between rows of `given` or `chosen`
  int32_t block_k;
  int32_t ctas_per_row;    // CTAs of the cluster that reads a row and chooses its blocks
  float* values;           // [rows, values_stride] or null: the greatest score of each block
  int64_t values_stride;   // as many values as a row has blocks, or more
  int32_t* value_lengths;  // [rows] beside `values`: values of each row that there is to choose from
};

// Tokens or slots of a call.
struct Ids {
  void* data;
  bool wide;  // of int64; else of int32
};

// A parameter of the sampler: one number for each row or slot, or one for all.
template <typename T>
struct RowParameter {
  const T* each;  // null: all rows have `all`
  T all;
};

// The order of a sampler's filters. kTemperatureLast is that of kHf at temperature 1.
enum class FilterOrder : int32_t { kVllm = 0, kHf = 1, kJoint = 2, kTemperatureLast = 3 };

// What the sampler leaves of a row. Mask, probabilities and log-probabilities follow from it and the scores.
struct alignas(16) SampleLimits {
  uint32_t key;   // order key of the least kept value
  int32_t token;  // the last kept one of the tokens with that value
  float max;      // the row's largest value
  float temperature;
  int32_t count;  // kept tokens
  int32_t flags;  // SampleFlags
  uint64_t mass;  // of the kept tokens
};
static_assert(sizeof(SampleLimits) == 32);

// What a row holds that is no usual score, and whether its kept tokens are more than there is room for.
enum SampleFlags : int32_t { kFlagNan = 1, kFlagNoCandidate = 2, kFlagKeptOverflow = 4 };

// The parameters of a launch of the sampler.
struct SampleParams {
  const void* logits;  // [rows, vocabulary], inner stride 1, `logits_stride` elements between rows
  int64_t logits_stride;
  int32_t rows;
  int32_t vocabulary;
  RowParameter<float> temperature, top_p, min_p;
  RowParameter<int32_t> top_k;
  RowParameter<int64_t> seed, position;
  Ids row_slot;              // [rows] or null: the row's entry in each parameter; without one it is skipped
  int64_t num_slots;         // entries of each parameter
  int32_t vectors_per_warp;  // 16-byte vectors of a row that each warp holds
  const uint32_t* allow;     // [allow_rows, allow_stride] or null: a bit for each token, set if it is allowed
  const int32_t* allow_row;  // [rows] or null (row); negative: everything is allowed
  int64_t allow_stride;
  int32_t allow_rows;
  FilterOrder order;
  bool gumbel;        // the draw adds noise to each kept score; otherwise it inverts the sum of masses
  bool raw_logprobs;  // log-probabilities are those of all tokens at temperature 1
  Dtype dtype;
  Ids out;               // [rows]
  float* logprobs;       // [rows] or null: of the token
  int64_t* ranks;        // [rows] or null: how many values are at or above the token's
  int32_t* kept;         // [rows, kept_columns] or null: the kept tokens, ascending
  float* kept_logprobs;  // [rows, kept_columns] or null
  int64_t kept_stride, kept_logprobs_stride;
  int64_t kept_columns;  // INT64_MAX if kept tokens are not asked for
  int32_t* counts;       // [rows] or null: kept tokens
  SampleLimits* limits;  // [rows] or null
  int32_t* flags;        // [rows] or null: SampleFlags
  int32_t* pending;  // [rows] or null: whether the kernel that streams rows has left a row to the other one
  bool one_kind;     // whether all rows have the same parameters
  bool noise_alone;  // whether rows without filters are asked for the greatest score with noise alone
};

// The parameters of a launch that applies limits. Masks are those of SampleParams.
struct LimitsParams {
  void* logits;  // [rows, vocabulary], inner stride 1; masked in place if `out` is null, else read
  int64_t logits_stride;
  int32_t rows;
  int32_t vocabulary;
  const SampleLimits* limits;  // [rows]
  const uint32_t* allow;
  const int32_t* allow_row;
  int64_t allow_stride;
  int32_t allow_rows;
  Dtype dtype;
  float* out;  // [rows, vocabulary] or null: probabilities
  int64_t out_stride;
};

// The parameters of a launch that ranks the largest values of each row, without a draw.
struct TopkLogprobsParams {
  SampleParams row;  // logits, sizes and the plan's numbers
  int32_t n;         // how many of the largest values
  Ids sampled;       // [rows]: a token of each row
  int64_t* ids;      // [rows, 1 + n]: the given token, then the largest values' in descending order
  float* logprobs;   // [rows, 1 + n]
  int64_t ids_stride, logprobs_stride;
  int64_t* ranks;  // [rows]: how many values are at or above the given token's
};

// Most ranks, and most items of a row, that agree through memory which all of them write into.
constexpr int32_t kPeerRanks = 16;
constexpr int32_t kPeerMaxK = 2048;
// Most CTAs of a launch, which wait for other ranks: two such launches leave room on an H100 for what other
// ranks may wait for.
constexpr int32_t kPeerCtas = 64;
// Cells of 8 bytes. In the memory of a rank each CTA has two places for the records of all ranks, each of so
// many cells together.
constexpr int32_t kPeerCells = 4352;
// Longest time that an exchange waits for a rank: a day.
constexpr int64_t kMaxTimeoutNs = int64_t{86400} * 1000000000;
// Words in which ranks have to agree.
constexpr int32_t kHeaderWords = 3;

// The parameters of a launch that finds the k largest scores of rows whose parts lie on several ranks.
struct ShardedParams {
  const void* logits;  // [rows, width], inner stride 1, `logits_stride` elements between rows
  int64_t logits_stride;
  const int32_t* lengths;  // [rows]: visible length of this rank's part
  const int32_t* best;     // [rows, k]: positions of its k best scores in any order, -1 for none
  int64_t best_stride;
  int32_t* out;    // [rows, k]: what is chosen of this rank's part, by positions in the row, then -1
  int32_t* local;  // [rows, k]: the same, by positions in the part
  int64_t out_stride, local_stride;
  int32_t* counts;                // [rows]
  uint64_t* inboxes[kPeerRanks];  // of each rank: what all ranks write into, and it reads
  uint32_t* progress;             // [kPeerCtas]: number of the last exchange of each CTA, or a state
  int64_t* told;  // of the host, [world + 1, kHeaderWords]: headers that differ; 1 + a late rank
  int64_t header[kHeaderWords];  // what ranks have to agree on
  const int64_t* step;           // or null: takes the place of the header's last word
  int64_t timeout_ns;            // how long an exchange waits
  int32_t rows, width, k, rank, world;
  int32_t interleave;  // positions that go to each rank in turn; 0: parts lie one behind the other
  Dtype dtype;
};

// The parameters of a launch that gives values and indices of selected items.
struct TopkItemsParams {
  const void* scores;  // [rows, width], inner stride 1, `scores_stride` elements between rows
  int64_t scores_stride;
  const int32_t* positions;   // [rows, k]: of the selected items, ascending
  const int64_t* candidates;  // [rows, width] or null: the index of each position
  void* values;               // [rows, k] or null
  int64_t* indices;           // [rows, k]
  int32_t* lengths;           // [rows]: `width`, for the launch that selects
  float* reversed;  // [rows, width] or null: numbers to select the smallest scores by, from the largest down
  int64_t reversed_stride;
  int32_t rows, width, k;
  bool sorted;       // the best items come first, or items by ascending positions
  void* sort_space;  // for a sort of many items (`sort_space_bytes`)
  Dtype dtype;
};

// The parameters of a launch that accepts drafts.
struct VerifyParams {
  Ids drawn;              // [rows]: the token drawn of each row
  Ids draft_tokens;       // [rows]: the token that stands at each row
  const int32_t* starts;  // [requests + 1] or null (each has `columns` rows): first row of each request
  Ids tokens;             // [requests, columns], `tokens_stride` elements between rows
  int64_t tokens_stride;
  int64_t rows;
  int32_t requests, columns;
  int32_t* lengths;  // [requests]
};

}  // namespace gvr_topk
