// Tokens and slots, which callers hold in 32 bits or in 64.
#pragma once

#include "gvr_topk/params.h"
#include "ptx/macros.cuh"

namespace gvr_topk {

GVR_DEVICE int64_t read_id(const Ids& ids, int64_t at) {
  return ids.wide ? static_cast<const int64_t*>(ids.data)[at] : static_cast<const int32_t*>(ids.data)[at];
}

GVR_DEVICE void write_id(const Ids& ids, int64_t at, int64_t id) {
  if (ids.wide) {
    static_cast<int64_t*>(ids.data)[at] = id;
  } else {
    static_cast<int32_t*>(ids.data)[at] = static_cast<int32_t>(id);
  }
}

}  // namespace gvr_topk
