//! Copies to the host for which the host has not waited: until then their memory holds garbage.

use super::vector_clock::Moment;

/// A copy that is under way.
pub(super) struct TravellingCopy {
    pub(super) moment: Moment,
    pub(super) to: u64,
    pub(super) bytes: Vec<u8>,
}

impl TravellingCopy {
    /// Writes the copied bytes, once the stream has passed.
    pub(super) fn arrive(self) {
        // SAFETY: the copy's caller promised that the memory stays valid until the stream has passed, which it now has.
        unsafe { std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), self.to as *mut u8, self.bytes.len()) };
    }
}
