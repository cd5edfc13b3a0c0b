//! Vector work interleaved with multiplications of tiles (software pipelining).
//!
//! The CPU does both at once where neither waits for the other, and there are no more than some hundred instructions of
//! one between two of the other. So an A micro-panel is packed while the one before it is multiplied, accumulators are
//! stored while the next are computed, and attention's scores become weights while those of the next queries are
//! computed. (One after the other, a GEMM of 1024³ took 1.2 times as long for packing and 1.07 for storing, attention
//! forward over 4096 positions 1.25 times. With the packing of attention's operands interleaved, too, it took 1.05
//! times as long.)
//!
//! The code that multiplies is compiled with the instructions of its background tasks, so that their common step is
//! inlined: a call, with the registers it saves and clears, takes as long as a step. (With calls GEMMs took 1.07 to 1.3
//! times as long.) Rare steps are called.

/// Work that is divided into steps of some tens of instructions.
pub(crate) trait BackgroundTask {
    /// The number of steps that remain.
    fn remaining(&self) -> usize;

    /// Does one step.
    ///
    /// # Safety
    /// A step remains, and the CPU supports the task's instructions.
    unsafe fn advance(&mut self);

    /// Performs all steps that remain.
    ///
    /// # Safety
    /// The CPU supports the task's instructions.
    unsafe fn finish(&mut self) {
        while self.remaining() > 0 {
            // SAFETY: a step remains; the caller guarantees the instructions.
            unsafe { self.advance() };
        }
    }
}

/// A task whose steps are spread evenly over a number of slots between multiplications.
pub(crate) struct Interleaved<W> {
    task: Option<W>,
    steps: usize,
    slots: usize,
    due: usize,
}

impl<W: BackgroundTask> Interleaved<W> {
    pub(crate) fn none() -> Self {
        Interleaved::new(None, 1)
    }

    pub(crate) fn new(task: Option<W>, slots: usize) -> Self {
        let steps = task.as_ref().map_or(0, W::remaining);
        Interleaved { task, steps, slots: slots.max(1), due: 0 }
    }

    /// Performs the steps that are due in one slot.
    ///
    /// # Safety
    /// The CPU supports the task's instructions.
    #[inline]
    pub(crate) unsafe fn tick(&mut self) {
        self.due += self.steps;
        while self.due >= self.slots {
            self.due -= self.slots;
            if let Some(task) = self.task.as_mut().filter(|task| task.remaining() > 0) {
                // SAFETY: a step remains; the caller guarantees the instructions.
                unsafe { task.advance() };
            }
        }
    }

    /// Performs all steps that remain, with no multiplication between them.
    ///
    /// # Safety
    /// The CPU supports the task's instructions.
    pub(crate) unsafe fn finish(&mut self) {
        (self.steps, self.due) = (0, 0);
        if let Some(task) = &mut self.task {
            // SAFETY: the caller guarantees the instructions.
            unsafe { task.finish() };
        }
        self.task = None;
    }
}
