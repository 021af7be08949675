#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

constexpr size_t kDigestBytes = 32;

// Writes the digests of consecutive blocks of block_bytes each. A digest is the SHA-256 of the digest
// before it, at first `parent`, and the block's bytes. digests: num_blocks * kDigestBytes. is_portable:
// use no instructions for SHA-256, so that tests run both kinds of code on one machine.
void chain_digests(const uint8_t* parent, const uint8_t* blocks, size_t num_blocks,
                   size_t block_bytes, uint8_t* digests, bool is_portable = false);

}  // namespace quire
