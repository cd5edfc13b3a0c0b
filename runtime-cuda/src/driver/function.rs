//! Functions of loaded modules.

use std::ffi::CString;

use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::{DriverFailure, Fallible, KernelFunction, cuda::words};

/// Bytes of dynamic shared memory that a kernel may use without opting in.
const PLAIN_SHARED: u32 = 48 << 10;

/// The function of a module that has this name, ready for launches with `shared` bytes of dynamic shared memory.
///
/// # Safety
/// A module that was loaded in the current context.
// SAFETY: as the section says.
pub(super) unsafe fn function(module: sys::CUmodule, entry: &str, shared: u32) -> Fallible<KernelFunction> {
    let entry = CString::new(entry).map_err(|e| DriverFailure::new(e.to_string()))?;
    // SAFETY: the caller's promise.
    let function = unsafe { result::module::get_function(module, entry) }.map_err(words)?;
    if shared > PLAIN_SHARED {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _alone = ONE_AT_A_TIME.lock();
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function lives in the module.
        let before = unsafe { result::function::get_function_attribute(function, which) }.map_err(words)?;
        // Another launch of this function may use more.
        let most = before.max(shared as i32);
        // SAFETY: as above.
        unsafe { result::function::set_function_attribute(function, which, most) }.map_err(words)?;
    }
    Ok(KernelFunction(function as usize as u64))
}
