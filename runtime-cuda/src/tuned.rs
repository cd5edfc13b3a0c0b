//! Algorithms of matrix products chosen by their measured time, on request only: two runs may choose differently.

use std::{collections::HashMap, time::Duration};

use numcore::{ErrorKind, MemoryCategory, Result};
use parking_lot::Mutex;

use crate::{
    driver::{CublasGemm, CudaStream, Driver, Fallible, GemmPlaces, Mark},
    kernel_times::timed_mark,
    queue::Queue,
};

/// The choices made for one GPU: the number of a candidate, or `None` where the library's own choice is kept.
#[derive(Default)]
pub(crate) struct TunedProducts(Mutex<HashMap<CublasGemm, Option<usize>>>);

/// The most products that are tuned. No choice is dropped, so later products use the library's choice.
const MOST_PRODUCTS: usize = 4096;

/// The number of timed rounds of each candidate, after one that is not counted.
const ROUNDS: usize = 3;

impl Queue {
    /// Returns the fastest candidate of a product, found at its first use and then kept. In a captured step nothing is
    /// timed.
    ///
    /// # Safety
    /// The conditions of [`Driver::gemm`].
    pub(crate) unsafe fn fastest_algorithm(
        &self,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
    ) -> Result<Option<usize>> {
        let tuned = &self.engine.tuned.0;
        let known = {
            let choices = tuned.lock();
            choices.get(gemm).copied().or((choices.len() >= MOST_PRODUCTS).then_some(None))
        };
        if known.is_some() || self.is_capturing() {
            return Ok(known.flatten());
        }
        // The lock is not held here: memory may have to wait for the end of a capture, which looks up choices.
        // SAFETY: the caller's promise.
        let found = unsafe { self.time_candidates(gemm, at, workspace)? };
        Ok(*tuned.lock().entry(*gemm).or_insert(found))
    }

    /// Times every candidate of a product, with the output in scratch memory: a caller's output that accumulates may be
    /// added to only once.
    ///
    /// # Safety
    /// The conditions of [`Driver::gemm`].
    unsafe fn time_candidates(
        &self,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
    ) -> Result<Option<usize>> {
        let candidates = self.driver().gemm_candidates(gemm, at.vector, workspace.1);
        let candidates = self.kept("matmul", candidates)?;
        if candidates < 2 {
            return Ok(None);
        }
        let bytes = gemm.output_elements() * gemm.into.size();
        let scratch = match self.memory.alloc(bytes, MemoryCategory::Activations) {
            Err(e) if matches!(e.kind(), ErrorKind::OutOfMemory { .. }) => return Ok(None),
            scratch => scratch?,
        };
        let at = GemmPlaces { d: scratch.address(), ..at };
        if gemm.add {
            // SAFETY: just allocated with this size.
            self.kept("matmul", unsafe { self.driver().zero(self.stream, at.d, bytes) })?;
        }
        let mut fastest: Vec<Option<Duration>> = vec![Some(Duration::MAX); candidates];
        for round in 0..=ROUNDS {
            // SAFETY: the caller's promise for operands; the output is this function's, with room for a result.
            let launch = |i| unsafe { self.driver().gemm(self.stream, gemm, at, workspace, Some(i)) };
            let times = time_each(self.driver(), self.stream, &mut fastest, launch);
            for (best, time) in fastest.iter_mut().zip(self.kept("matmul", times)?).filter(|_| round > 0) {
                *best = best.map(|best| best.min(time));
            }
        }
        let timed = fastest.into_iter().enumerate().filter_map(|(i, time)| Some((time?, i)));
        Ok(timed.min().map(|(_, i)| i))
    }
}

/// Measures each remaining launch, queued back to back so that the time of launching is in none. A candidate that fails
/// is struck out, unless the device is lost.
fn time_each(
    driver: &dyn Driver,
    stream: CudaStream,
    left: &mut [Option<Duration>],
    launch: impl Fn(usize) -> Fallible<()>,
) -> Fallible<Vec<Duration>> {
    let mut marks = Marks { driver, marks: vec![timed_mark(driver, stream)?] };
    for (i, candidate) in left.iter_mut().enumerate() {
        match candidate.map_or(Ok(()), |_| launch(i)) {
            Err(failure) if !failure.is_sticky() => *candidate = None,
            done => done?,
        }
        marks.marks.push(timed_mark(driver, stream)?);
    }
    marks.marks.last().map_or(Ok(()), |last| driver.await_mark(*last))?;
    marks.marks.windows(2).map(|pair| driver.elapsed(pair[0], pair[1])).collect()
}

/// Marks that are destroyed on drop.
struct Marks<'a> {
    driver: &'a dyn Driver,
    marks: Vec<Mark>,
}

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        self.marks.iter().for_each(|mark| self.driver.destroy_mark(*mark));
    }
}
