// What the CTAs of a cluster tell each other. First types for the regions of shared memory that other CTAs
// store to: code of this CTA can read such a region and compute its address in other CTAs. It has no way to
// write the region (apart from the exceptions below), nor to make it the target of a copy. Then the counts of
// an interval of keys that CTAs exchange, and their sums.
#pragma once

#include <cstdint>

#include "core/key_range.cuh"
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
  // All threads store the same, so that none branches.
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

// The counts of one CTA in its part of the row.
struct Counts {
  uint32_t above;   // elements above the interval
  uint32_t listed;  // elements inside it other than those of the tie key; may exceed the list's capacity
  uint32_t equal;   // elements equal to the tie key
};

// The header that a CTA sends to all others. Each CTA reads the row's length and guesses the interval for
// itself, from memory that another stream may be writing. So the length and the interval travel with the
// counts, and counts are added only if all CTAs agree on both.
struct alignas(16) Header {
  Counts counts;
  int32_t length;
  uint32_t lo;
  uint32_t hi;
  uint32_t unused[2];
};
constexpr int kHeaderVecs = sizeof(Header) / sizeof(uint4);
static_assert(kHeaderVecs == 2);

// The combined headers of a cluster: the same in all its CTAs, except for `above_before`.
struct CountResult {
  bool agreed;            // All CTAs used the same length and interval.
  bool contains_k;        // All CTAs agreed, and the k-th key lies in the interval.
  bool complete;          // `contains_k` holds, and every CTA's list had room.
  uint32_t above;         // elements above the interval
  uint32_t above_before;  // elements above the interval in earlier CTAs
  uint32_t rank;          // rank of the k-th key from the top, among the elements inside
  uint32_t inside;        // elements inside the interval
  uint32_t equal;         // elements inside that equal the tie key
};

// What a CTA knows about a row whose guessed interval has missed, or that starts over with everything for its
// interval. The later stages start from it. All CTAs of a cluster know the same but `above_before` and, where
// memory is being rewritten, the moments and `source`.
struct MissedGuess {
  KeyInterval interval;   // the last one tried
  CountResult result;     // its counts, or none of them where the row starts over
  int passes;             // counting passes so far, each with one exchange
  int length;             // length of the row
  int elements;           // length for which the row was laid out over registers
  float mean, deviation;  // moments of the row's sample
  uint32_t source;        // `GuessSource` of the first guess
};

}  // namespace gvr_topk
