// Offsets of the parts of a packed weight.
#include "linear.h"

namespace quire {
namespace {

int64_t panel_of(const PackedWeight& weight) { return linear_kernels(weight.variant).panel; }

int64_t panels_bytes(const PackedWeight& weight) {
    const int64_t panel = panel_of(weight);
    return (weight.outputs + panel - 1) / panel * packed_panel_bytes(weight);
}

}  // namespace

PanelLayout::PanelLayout(const PackedWeight& weight)
    : panel(panel_of(weight)), groups(weight.groups()) {
    const FormatParts& parts = weight.parts();
    const bool is_nested = parts.scales == Scales::kNested;
    const int64_t num_nested = parts.offsets == Offsets::kNested ? 2 : 1;
    block_groups = is_nested ? kNestedInputs / weight.group : 1;
    header_bytes = is_nested ? panel * 2 * num_nested : 0;
    scale_bytes = panel * bytes_of(parts.scales);
    offset_bytes = panel * bytes_of(parts.offsets, parts.scales);
    factor_bytes = header_bytes + block_groups * (scale_bytes + offset_bytes);
    group_bytes = panel * weight.group * bits_of(parts.values) / 8;
    block_bytes = factor_bytes + block_groups * group_bytes;
    const int64_t words = (weight.inputs * bits_of(parts.values) + 31) / 32;  // without groups
    bytes = weight.has_groups() ? groups / block_groups * block_bytes : panel * 4 * words;
}

const int32_t* PackedWeight::order() const {
    if (!is_ordered) return nullptr;
    return reinterpret_cast<const int32_t*>(data + panels_bytes(*this));
}

int32_t stored_bias(const PackedWeight& weight) {
    const FormatParts& parts = weight.parts();
    if (parts.values != Values::kInt8) return parts.bias;
    return static_cast<int32_t>(linear_kernels(weight.variant).int8_offset);
}

int64_t packed_panel_bytes(const PackedWeight& weight) { return PanelLayout(weight).bytes; }

int64_t packed_bytes(const PackedWeight& weight) {
    return panels_bytes(weight) + (weight.is_ordered ? weight.inputs * 4 : 0);
}

}  // namespace quire
