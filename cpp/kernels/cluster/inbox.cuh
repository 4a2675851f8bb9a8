// Types for the regions of shared memory that other CTAs store to. Code of this CTA can read such a region
// and compute its address in other CTAs. It has no way to write the region (apart from the exceptions below),
// nor to make it the target of a copy.
#pragma once

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace gvr_topk {

// One item per sender. Senders are the CTAs of the cluster, this one included.
template <typename Item, int kCount>
class Inbox {
 public:
  GVR_DEVICE const Item& operator[](int i) const { return items_[i]; }

  // Returns the address of CTA `rank`'s item `i`, for a transaction store.
  GVR_DEVICE uint32_t address_in(uint32_t rank, int i) const {
    return ptx::map_to_rank(ptx::shared_address(&items_[i]), rank);
  }

  // Stores the item of a cluster of one CTA, which has no other sender and so uses no transaction barrier.
  GVR_DEVICE void put_alone(const Item& item) { items_[0] = item; }

 private:
  Item items_[kCount];
};

// The keys that the CTAs of a cluster list, in one segment per CTA. Threads of this CTA write only its own
// segment, and send it to the same offset in all other CTAs. Every other CTA does the same with its segment.
class KeyList {
 public:
  KeyList() = default;
  GVR_DEVICE KeyList(uint32_t* keys, int segment, int rank) : keys_(keys), segment_(segment), rank_(rank) {}

  // Returns how many keys one CTA may list.
  GVR_DEVICE int segment() const { return segment_; }

  GVR_DEVICE const uint32_t* of(int cta) const { return keys_ + cta * segment_; }

  // Returns the memory behind the list, which has room for `capacity` keys in all.
  GVR_DEVICE void* end(int capacity) const { return keys_ + capacity; }

  // Keys past the segment's end are dropped, so `slot` may be any number.
  GVR_DEVICE void put(uint32_t slot, uint32_t key) const {
    if (slot < static_cast<uint32_t>(segment_)) keys_[rank_ * segment_ + slot] = key;
  }

  // Returns the address that this CTA's segment has in CTA `target`, for transaction stores.
  GVR_DEVICE uint32_t own_address_in(uint32_t target) const {
    return ptx::map_to_rank(ptx::shared_address(of(rank_)), target);
  }

 private:
  uint32_t* keys_;  // [ctas][segment]
  int segment_;
  int rank_;
};

}  // namespace gvr_topk
