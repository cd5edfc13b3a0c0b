//! Shares of each batch that follow the measured speeds of ranks.

use std::time::Instant;

use adaptive::balance::SpeedShares;
use data::Loader;
use distributed::{
    RankDevices,
    combinations::Feature,
    comm::Communicator,
    strategy::BatchShare,
    train::{Step, StepInput, StepWork, TrainingMetrics},
};
use numcore::{Error, Result, Runtime};

use super::Weighting;

/// The shares of each batch that ranks read. Shares change no batch, and a step divides by the weight of all ranks. So
/// results are those of even shares, up to rounding and to random values within the model.
///
/// No share by measured speed is less than a twentieth. Steps in which ranks take whole batches in turn have no shares.
/// Shares are even, even if others were given, where sizes change results: with pipelines, local updates, sums in
/// canonical order and [`Weighting::PerMicroBatch`]. With ZeRO stage 3 and experts over ranks, forward passes wait for
/// other ranks and measure no speed: first shares are kept. Batch norm's statistics follow the shares.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Shares {
    /// Shares by measured speed on ranks of different devices, even shares otherwise.
    #[default]
    WhereDevicesDiffer,
    /// Even shares.
    Even,
    /// Shares by measured speed on any devices. The given shares are the first.
    BySpeed(SpeedShares),
}

impl Shares {
    /// The shares by speed of a step; none for even shares.
    pub(super) fn of<R: Runtime>(
        &self,
        step: &impl Step<R>,
        devices: &RankDevices,
        weighting: Weighting,
    ) -> Result<Option<SpeedShares>> {
        let (of, properties) = (step.ranks().share.of, step.properties());
        let even = [Feature::Pipeline, Feature::Canonical, Feature::Local];
        let needs_even = even.into_iter().any(|feature| properties.features.has(feature));
        match self {
            _ if properties.in_turn.is_some() || of == 1 => Ok(None),
            _ if needs_even || weighting != Weighting::ByWeight => Ok(None),
            Shares::BySpeed(shares) if shares.ratios().len() != of => Err(Error::range(
                "Shares::BySpeed",
                "number of shares",
                shares.ratios().len(),
                format!("{of}, as ranks have"),
            )),
            Shares::BySpeed(shares) => Ok(Some(shares.clone())),
            Shares::WhereDevicesDiffer if devices.is_heterogeneous() && measures(step) => {
                SpeedShares::new(of).map(Some)
            }
            Shares::WhereDevicesDiffer | Shares::Even => Ok(None),
        }
    }
}

/// Tells whether forward passes show the speed of a rank: none waits for others.
fn measures<R: Runtime>(step: &impl Step<R>) -> bool {
    let features = step.properties().features;
    ![Feature::ZeroParameters, Feature::Experts].into_iter().any(|feature| features.has(feature))
}

/// The loader of the batches that this rank reads.
pub(super) fn own_batches<R: Runtime, B: Send + 'static>(
    loader: Loader<B>,
    step: &impl Step<R>,
    shares: Option<&SpeedShares>,
) -> Loader<B> {
    let BatchShare { index, of } = step.ranks().share;
    match (step.properties().in_turn, shares.cloned()) {
        // Batches that other ranks read are not made.
        (Some(_), _) => loader.rank(0, 1).workers(0),
        (None, Some(shares)) => loader.uneven(index, move |rows| shares.sizes(rows)),
        (None, None) => loader.rank(index, of),
    }
}

/// Takes a step of some micro-batches, or by given counts in turn. Inputs come with their numbers of examples, and the
/// step is measured for the shares. Measured are forward passes with the wait for their data: in backward passes ranks
/// may wait for each other.
pub(super) fn measured_step<R: Runtime>(
    step: &mut impl Step<R>,
    shares: Option<&mut SpeedShares>,
    (micro_batches, counts): (usize, Option<Vec<usize>>),
    input: &mut dyn FnMut(usize) -> Result<(StepInput<R>, usize)>,
) -> Result<TrainingMetrics<R>> {
    let measures = measures(step);
    let Some(shares) = shares.filter(|_| measures) else {
        return step.step(StepWork::new(micro_batches, &mut |k| Ok(input(k)?.0)).in_turn(counts));
    };
    let (rt, mut seconds, mut examples) = (step.ranks().everyone.runtime().clone(), 0.0, 0);
    let mut measured = |k| {
        // An error in here is one on all ranks.
        rt.synchronize()?;
        let begun = Instant::now();
        let (input, count) = input(k)?;
        rt.synchronize()?;
        (seconds, examples) = (seconds + begun.elapsed().as_secs_f64(), examples + count);
        Ok(input)
    };
    let metrics = step.step(StepWork::new(micro_batches, &mut measured))?;
    shares.exchange(step.ranks(), seconds, examples)?;
    Ok(metrics)
}

/// The devices of a run, and the shares of its ranks.
pub(super) fn summary(devices: &RankDevices, shares: Option<&SpeedShares>) -> String {
    let Some(shares) = shares else { return devices.summary() };
    let percent: Vec<String> = shares.ratios().iter().map(|ratio| format!("{:.0} %", 100.0 * ratio)).collect();
    format!("{devices}\nshares of a batch: {}", percent.join(", "))
}
