// What the CUDA files of a stress build add while the library is loaded. Device code is linked file by file,
// so every file has device variables of its own, and one call has to reach them all.
#pragma once

#include <vector>

namespace gvr_topk::stress {

// All entries of one type. Files add theirs in an unspecified order, so a static object at file scope might
// not exist yet.
template <typename Entry>
std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

template <typename Entry>
bool add(Entry entry) {
  entries<Entry>().push_back(entry);
  return true;
}

}  // namespace gvr_topk::stress

#define GVR_TOPK_EXPORT extern "C" __attribute__((visibility("default")))
