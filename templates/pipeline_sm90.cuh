// Rings in shared memory with their barriers, and how wgmma is told where an operand lies.
#pragma once

namespace cutlass_sep {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

/// Programmatic dependent launch: a kernel may start while the one before it on the stream still runs. `await_grid_before` ends when that one
/// and what it wrote are complete; `admit_next_grid` lets the next one start. Every kernel of a call does both, in this order, so that whatever
/// came before a call is complete when the second kernel of the call starts. (cutlass/arch has them in a header that includes all of GEMM.)
CUTLASS_DEVICE void await_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
CUTLASS_DEVICE void admit_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

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

/// Where wgmma finds an operand in shared memory, `bytes` behind `address`. `leading`, `stride`: bytes as its canonical layouts define them.
/// Only the low word depends on the address, so that stepping through an operand is one 32-bit addition.
template <cute::SM90::GMMA::LayoutType Layout>
CUTLASS_DEVICE uint64_t operand_descriptor(char const* address, int leading, int stride, int bytes) {
  cute::GmmaDescriptor d;
  d.desc_ = 0;
  d.bitfield.stride_byte_offset_ = stride >> 4;
  d.bitfield.layout_type_ = uint8_t(Layout);
  uint32_t const low = (cute::cast_smem_ptr_to_uint(address) >> 4 | uint32_t(leading >> 4) << 16) + (bytes >> 4);
  return d.desc_ | low;
}

/// K-major, elements of any size in rows of 128 bytes with TMA's 128-byte swizzle: 8-row groups lie 1024 bytes apart.
CUTLASS_DEVICE uint64_t k_major_descriptor(char const* address, int bytes = 0) {
  return operand_descriptor<cute::SM90::GMMA::LayoutType::B128>(address, 16, 1024, bytes);
}

/// MN-major, 16-bit, in blocks of 16 rows of the MMA: a block is [k][32 bytes] with TMA's 32-byte swizzle, and blocks lie `block_bytes` apart.
CUTLASS_DEVICE uint64_t mn_major_descriptor(char const* address, int block_bytes, int bytes) {
  return operand_descriptor<cute::SM90::GMMA::LayoutType::B32>(address, block_bytes, 256, bytes);
}

/// MN-major, 16-bit, 64 rows of the MMA: [k][128 bytes] with TMA's 128-byte swizzle.
CUTLASS_DEVICE uint64_t mn_major_row_descriptor(char const* address, int bytes) {
  return operand_descriptor<cute::SM90::GMMA::LayoutType::B128>(address, 16, 1024, bytes);
}

}  // namespace cutlass_sep
