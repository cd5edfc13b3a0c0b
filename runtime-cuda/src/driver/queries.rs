//! Queries that the bindings do not make, or make only of newer drivers.

use cudarc::driver::{result, sys};

use super::{DriverFailure, DriverFailureKind, Fallible, capture_gate::relaxed, cuda::words, libraries};

/// The type of `cuEventElapsedTime`.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// The milliseconds between two events. The bindings for CUDA 13 call this function's second version, which drivers have
/// from CUDA 12.8 on.
///
/// # Safety
/// Events of the current context that record times.
// SAFETY: as the section says.
pub(super) unsafe fn elapsed(from: sys::CUevent, to: sys::CUevent) -> Fallible<f32> {
    // SAFETY: the type is the header's.
    let elapsed: ElapsedTime = unsafe { libraries::of_driver("cuEventElapsedTime") }?;
    let mut milliseconds = 0.0;
    // SAFETY: the caller's promise; the pointer is valid.
    unsafe { elapsed(&mut milliseconds, from, to) }.result().map_err(words)?;
    Ok(milliseconds)
}

/// The device's fault behind a failure of a library, whose status does not reveal one. A library that refuses a product
/// has touched nothing, and a query would invalidate a capture: neither is asked about.
///
/// # Safety
/// A stream of the current context.
// SAFETY: as the section says.
pub(super) unsafe fn fault(stream: sys::CUstream, failure: &DriverFailure) -> Option<DriverFailure> {
    // SAFETY: the caller's promise.
    let captures = unsafe { result::stream::is_capturing(stream) };
    let is_idle = captures == Ok(sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    if failure.kind != DriverFailureKind::Once || !is_idle {
        return None;
    }
    // SAFETY: the caller's promise.
    let state = relaxed(|| unsafe { sys::cuStreamQuery(stream) }.result());
    let fault = state.err().map(|error| DriverFailure::of_code(error.0 as u32, failure.to_string()));
    fault.filter(DriverFailure::is_sticky)
}
