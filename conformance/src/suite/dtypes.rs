//! Narrow types against the widest, `f64` where a runtime computes in it. The same inputs, rounded to the narrow type
//! first, must give nearly the same results.

use numcore::{DType, Runtime};

use super::{
    case::OpCase,
    cases,
    close::{agree, forward_backward, rounded},
    report::Section,
};

/// The error that a result may have, in spacings of the type at the scale of its tensor's largest element. Cases with
/// long sums or cancellation have a factor on it.
const SPACINGS: f64 = 6.0;

/// Tells whether a runtime computes in a dtype: half-precision types are computed in `f32`.
pub(crate) fn computes<R: Runtime>(rt: &R, dtype: DType) -> bool {
    !dtype.is_storage() && casts(rt, dtype)
}

/// Tells whether a runtime casts from and to a dtype that it stores.
pub(crate) fn casts<R: Runtime>(rt: &R, dtype: DType) -> bool {
    rt.capabilities().compute.contains(&dtype.compute())
}

/// The reason for skipping checks of a type in which the runtime does not compute.
pub(crate) fn lacks(dtype: DType) -> String {
    format!("{dtype} is not in capabilities.compute")
}

/// The types among `dtypes` in which a runtime stores and computes. For the others, `what` is skipped; 8-bit floats, in
/// which none computes, are left out.
pub(crate) fn computed<R: Runtime>(
    rt: &R,
    section: &mut Section,
    what: &str,
    dtypes: impl IntoIterator<Item = DType>,
) -> Vec<DType> {
    let mut usable = Vec::new();
    for dtype in stored(rt, section, what, dtypes.into_iter().filter(|dtype| !dtype.is_storage())) {
        match computes(rt, dtype) {
            true => usable.push(dtype),
            false => section.skip(format!("{what}: {}", lacks(dtype))),
        }
    }
    usable
}

/// The types among `dtypes` that a runtime stores. For the others, `what` is skipped.
pub(crate) fn stored<R: Runtime>(
    rt: &R,
    section: &mut Section,
    what: &str,
    dtypes: impl IntoIterator<Item = DType>,
) -> Vec<DType> {
    let (usable, others): (Vec<_>, Vec<_>) =
        dtypes.into_iter().partition(|dtype| rt.capabilities().storage.contains(dtype));
    others.iter().for_each(|dtype| section.skip(format!("{what}: {dtype} is not in capabilities.storage")));
    usable
}

pub(crate) fn narrow<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("narrow types");
    // The reference of the others: the widest type in which the runtime computes.
    let wide = if computes(rt, DType::F64) { DType::F64 } else { DType::F32 };
    if wide == DType::F32 {
        section.skip(format!("f32: {}, with which it is compared", lacks(DType::F64)));
    }
    let narrower = [DType::F32, DType::F16, DType::BF16].into_iter().filter(|d| *d != wide);
    for dtype in stored(rt, &mut section, "cases", narrower) {
        for case in cases::all::<R>() {
            // Half-precision values are too coarse for sums of exponentials of hundreds.
            let coarse = dtype.is_half() && case.inputs.iter().any(|s| s.values().iter().any(|v| v.abs() > 100.0));
            if !coarse {
                section.check(format!("{} {dtype}", case.name), || compare(rt, &case, dtype, wide));
            }
        }
    }
    section
}

fn compare<R: Runtime>(rt: &R, case: &OpCase<R>, dtype: DType, wide: DType) -> numcore::Result<super::report::Verdict> {
    let narrow = case.tensors(rt, dtype)?;
    let exact = case
        .inputs
        .iter()
        .map(|s| s.with(rt, wide, &if s.is_float() { rounded(rt, s.values(), dtype)? } else { s.values().to_vec() }))
        .collect::<numcore::Result<Vec<_>>>()?;
    let want = forward_backward(rt, case, &exact)?;
    Ok(agree(&forward_backward(rt, case, &narrow)?, &want, SPACINGS * case.slack * dtype.epsilon()))
}
