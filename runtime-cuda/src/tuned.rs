//! The algorithm of a product by the time that it takes, for callers who ask for it: two runs may choose two.

use std::{collections::HashMap, time::Duration};

use numcore::{ErrorKind, MemoryCategory, Result};
use parking_lot::Mutex;

use crate::{
    driver::{CublasGemm, Driver, Fallible, GemmPlaces, Mark, Stream},
    kernel_times::timed_mark,
    queue::Queue,
};

/// The choices made for one GPU: the number of a candidate, or nothing where the library's own choice is kept.
#[derive(Default)]
pub(crate) struct TunedProducts(Mutex<HashMap<CublasGemm, Option<usize>>>);

/// The number of products that are tuned; later ones have the library's choice, since no choice is dropped.
const MOST_PRODUCTS: usize = 4096;

/// How often each candidate is timed, after a first time that is not counted.
const ROUNDS: usize = 3;

impl Queue {
    /// The candidate that is fastest for a product: found at its first use, and kept. In a captured step nothing is timed.
    ///
    /// # Safety
    /// As for [`Driver::gemm`].
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
        if known.is_some() || self.capture_number().is_some() {
            return Ok(known.flatten());
        }
        // Not under the lock: memory may have to wait for the end of a capture, which asks for choices.
        // SAFETY: the caller's promise.
        let found = unsafe { self.time_candidates(gemm, at, workspace)? };
        Ok(*tuned.lock().entry(*gemm).or_insert(found))
    }

    /// Runs every candidate of a product, into memory of this function's own: the caller's may be added to once.
    ///
    /// # Safety
    /// As for [`Driver::gemm`].
    unsafe fn time_candidates(
        &self,
        gemm: &CublasGemm,
        at: GemmPlaces,
        workspace: (u64, usize),
    ) -> Result<Option<usize>> {
        let candidates = self.driver().gemm_candidates(gemm, at.bias, workspace.1);
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

/// How long each launch that is left takes, one right behind the other, so that the time of launching is in none. Those that fail are struck out, unless the
/// device is lost.
fn time_each(
    driver: &dyn Driver,
    stream: Stream,
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

/// Marks that are destroyed when they were read.
struct Marks<'a> {
    driver: &'a dyn Driver,
    marks: Vec<Mark>,
}

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        self.marks.iter().for_each(|mark| self.driver.destroy_mark(*mark));
    }
}
