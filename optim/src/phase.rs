//! The two phases of an update whose rule adapts to sums over all parameters.

use numcore::{Error, Result, Runtime, Tensor};

use crate::{StepContext, Totals, UpdateMemory, UpdateRule};

/// A phase of an update, by what it gathers: sums, each with the number of its parameter, or nothing.
pub enum UpdatePhase<'a, R: Runtime> {
    /// The first phase gathers the [sums](UpdateRule::sums) of rules that have some. Parameters do not change.
    Sums(&'a mut Vec<(usize, Tensor<R>)>),
    /// The second phase updates parameters.
    Change,
}

impl<R: Runtime> UpdatePhase<'_, R> {
    /// Tells whether parameters change.
    pub fn changes(&self) -> bool {
        matches!(self, UpdatePhase::Change)
    }

    /// The sums gathered so far.
    pub(crate) fn rows(&mut self) -> &mut [(usize, Tensor<R>)] {
        match self {
            UpdatePhase::Sums(rows) => rows,
            UpdatePhase::Change => &mut [],
        }
    }

    /// Runs the phase for the run or parameter of `memory`.
    pub(crate) fn run<C: UpdateRule>(
        &mut self,
        (config, kernel): (&C, &C::Kernel),
        now: StepContext,
        memory: &mut UpdateMemory<'_, R>,
    ) -> Result<()> {
        match self {
            UpdatePhase::Change => config.update(kernel, now, memory)?,
            UpdatePhase::Sums(_) if config.sum_count() == 0 => {}
            UpdatePhase::Sums(rows) => rows.push((memory.ranges.start, config.sums(kernel, now, memory)?)),
        }
        Ok(())
    }

    /// An error in the first phase for a rule whose sums would be those of a parameter that one of several ranks has.
    pub(crate) fn check_whole<C: UpdateRule>(&self, config: &C) -> Result<()> {
        if self.changes() || config.sum_count() == 0 {
            return Ok(());
        }
        let why = "adapts to sums over all parameters, and needs whole ones, of which ranks have pieces: cut none along tensor";
        Err(Error::unsupported(C::NAME, why))
    }
}

/// The rules of all groups, with these learning rates, after they have adapted to the sums.
pub(crate) fn adapted<C: UpdateRule>(groups: &[C], lrs: &[f64], sums: &[f64], loss: Option<f64>) -> Result<Vec<C>> {
    let adapted = |(config, &lr): (&C, &f64)| {
        let mut new = config.clone();
        let own = sums.get(..config.sum_count()).ok_or_else(|| Error::internal(C::NAME, "sums are missing"))?;
        new.adapt(&Totals { lr, sums: own, loss })?;
        new.check().map(|()| new)
    };
    groups.iter().zip(lrs).map(adapted).collect()
}
