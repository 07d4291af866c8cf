//! Which kernels compute a problem, and which of them is cheapest.

use super::device::DeviceLimits;
use crate::kernels::{Feature, FeatureSet, Variant};
use crate::tuning::{Shape, Tuning};

/// Returns the cost of a kernel for a problem with these features. Compares in this order:
/// - features of scores that the problem does not use, because each takes registers and instructions in every step;
/// - columns, because kernels compute padding too;
/// - other features that the problem does not use: they cost a few percent, outside the loop.
///
/// Kernels of equal cost keep the order of the table, with larger blocks first.
fn cost(v: &Variant, features: FeatureSet) -> (u32, u32, u32) {
    let unused = v.features.without(features);
    (unused.without(FeatureSet::VARLEN).count(), v.headdim + v.headdim_v, unused.count())
}

/// Maximum of [`Shape::rows_before_keys`] for kernels that require ALiBi. Other kernels compute rows further before the first key.
///
/// Kernels that require ALiBi start their sums of products with -slope * distance, so a large distance takes bits from the products. Rows near
/// a visible key give it almost all weight, and there the distance is small. At this limit and a slope of 1 the start is 739 in log2 units,
/// with a last bit of 2^-14. About 32 steps each lose a third of it (RMS), in total 1e-4. Rounding a probability to fp16 costs 2e-4.
///
/// The host does not know the lengths of packed sequences. For them the maximum lengths count.
const FAR: i64 = 512;

/// Returns true if a kernel computes this shape with these features, and fits the device's shared memory.
pub(super) fn is_applicable(v: &Variant, shape: &Shape, features: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.is_bf16 == shape.is_bf16
        && v.features.contains(features)
        && features.contains(v.required_features)
        && (shape.rows_before_keys <= FAR || !v.required_features.contains(FeatureSet::of(&[Feature::Alibi])))
        && v.shared_bytes <= d.shared_bytes_per_block
}

/// Returns the cheapest applicable kernel that did not fail in `avoid`.
pub(super) fn cheapest(
    of: impl Iterator<Item = &'static Variant>,
    shape: &Shape,
    features: FeatureSet,
    d: &DeviceLimits,
    avoid: Option<&Tuning>,
) -> Option<&'static Variant> {
    of.filter(|v| is_applicable(v, shape, features, d) && !avoid.is_some_and(|t| t.has_failed(v))).min_by_key(|v| cost(v, features))
}
