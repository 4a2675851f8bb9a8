// The exports of a build that counts warp collectives (converged.h) beside the op.
#include "converged_counts.h"
#include "registry.h"

using gvr_topk::converged::Count;
using gvr_topk::converged::kApartBit;
using gvr_topk::converged::kPlaces;
using gvr_topk::converged::Table;
using gvr_topk::stress::entries;

// Number of CUDA files that count.
GVR_TOPK_EXPORT int gvr_topk_converged_files() { return static_cast<int>(entries<Table>().size()); }

// Number of places that every file has counts for.
GVR_TOPK_EXPORT int gvr_topk_converged_places() { return kPlaces; }

// Path of a file that counts; null if there is none of this number.
GVR_TOPK_EXPORT const char* gvr_topk_converged_file(int file) {
  const bool known = file >= 0 && file < gvr_topk_converged_files();
  return known ? entries<Table>()[file].file : nullptr;
}

// Reads the counts of a file on the current device, for which it waits: for each place the lanes that reached
// it, and those of them that came without the whole of their warp. Returns a CUDA status.
GVR_TOPK_EXPORT int gvr_topk_converged_counts(int file, uint64_t (*counts)[2]) {
  if (gvr_topk_converged_file(file) == nullptr || counts == nullptr) return cudaErrorInvalidValue;
  std::vector<Count> places(kPlaces);
  const cudaError_t status = entries<Table>()[file].read(places.data());
  if (status != cudaSuccess) return status;
  for (uint32_t i = 0; i < kPlaces; ++i) {
    counts[i][0] = counts[i][1] = 0;
    for (const uint64_t word : places[i].words) {
      counts[i][0] += word & ((uint64_t{1} << kApartBit) - 1);
      counts[i][1] += word >> kApartBit;
    }
  }
  return cudaSuccess;
}
