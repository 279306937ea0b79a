// Rings in shared memory with their barriers, and how wgmma is told where an operand lies.
#pragma once

namespace cutlass_sep {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

/// Position in a ring of `Slots`: the slot and the parity of its current round.
template <int Slots>
struct RingCursor {
  int slot = 0;
  uint32_t parity = 0;
  CUTLASS_DEVICE void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1;
    }
  }
  CUTLASS_DEVICE RingCursor after(int count) const {
    return {(slot + count) % Slots, parity ^ ((slot + count) / Slots & 1)};
  }
};

/// A K-major operand of 16-bit or 32-bit elements in rows of 128 bytes with TMA's 128-byte swizzle: 8-row groups lie 1024 bytes apart.
CUTLASS_DEVICE uint64_t k_major_descriptor(char const* address) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(address) >> 4;
  d.bitfield.leading_byte_offset_ = 1;
  d.bitfield.stride_byte_offset_ = 1024 >> 4;
  d.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return d.desc_;
}

/// An MN-major operand of 16-bit elements in blocks of 16 rows of the MMA: a block is [k][32 bytes] with TMA's 32-byte swizzle, and blocks lie
/// `block_bytes` apart.
CUTLASS_DEVICE uint64_t mn_major_descriptor(char const* address, int block_bytes) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(address) >> 4;
  d.bitfield.leading_byte_offset_ = block_bytes >> 4;
  d.bitfield.stride_byte_offset_ = 256 >> 4;  // 8 k
  d.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B32);
  return d.desc_;
}

/// 64 rows of the MMA of an MN-major operand of 16-bit elements: [k][128 bytes] with TMA's 128-byte swizzle.
CUTLASS_DEVICE uint64_t mn_major_row_descriptor(char const* address) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(address) >> 4;
  d.bitfield.leading_byte_offset_ = 1;  // one block of 64 rows: there is no next one
  d.bitfield.stride_byte_offset_ = 1024 >> 4;  // 8 k
  d.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return d.desc_;
}

}  // namespace cutlass_sep
