// Bits of the `flags` argument of the ops. packaging/generate_constants.py gives Python the same names.
#pragma once

#include <cstdint>

namespace gvr_topk {

constexpr int64_t kFlagPdl = 1;
constexpr int64_t kFlagQuantileGuess = 2;
constexpr int64_t kFlagClampPages = 4;
constexpr int64_t kFlagDropMasked = 8;
constexpr int64_t kFlagStreams = 16;

}  // namespace gvr_topk
