//! Running a program over one world after another.

use std::panic::resume_unwind;

use numcore::{Result, Runtime};

use super::ElasticWorld;
use crate::comm::{Collectives, Rendezvous, engine::guarded};

/// A rank of a run whose world may change.
///
/// ```
/// use distributed::{
///     comm::{Communicator, Quorum, ThreadRendezvous},
///     elastic::Elastic,
///     train::{Loss, TrainStep},
/// };
/// # use nn::{Forward, Init, Linear};
/// # use numcore::{DType, Error, Tensor};
/// # use optim::AdamWConfig;
/// # use runtime_cpu::Cpu;
/// # use std::time::Duration;
/// # fn main() -> numcore::Result<()> {
/// # let minute = Duration::from_secs(60);
/// let runtimes = (0..3).map(|_| Cpu::with_threads(1)).collect();
/// let (_rendezvous, seats) = ThreadRendezvous::new(runtimes, Quorum::default(), minute)?;
/// let outcomes = Elastic::on_threads(seats, |elastic| elastic.copies(1), |world| {
///     let comm = world.comm()?;
///     let model = Linear::new(&Init::new(comm.runtime(), 0), 4, 1)?;
///     let mut step = TrainStep::builder(&comm, &model).optimizer(AdamWConfig::default()).build()?;
///     world.restore(&mut step)?;
///     world.commit(step.global_step(), &step, &Default::default())?;
///     while step.global_step() < 10 {
/// #       if (step.global_step(), comm.size(), comm.rank()) == (5, 3, 1) {
/// #           return Err(Error::argument("the machine", "is gone"));
/// #       }
/// #       let x = autograd::Var::new(Tensor::zeros(comm.runtime(), [8, 4], DType::F32)?);
/// #       let y = autograd::Var::new(Tensor::zeros(comm.runtime(), [8, 1], DType::F32)?);
///         step.step(|_| Ok(Loss::mean(nn::loss::mse(&model.forward(&x)?, &y, Default::default())?)))?;
///         world.commit(step.global_step(), &step, &Default::default())?;
///     }
///     Ok((comm.size(), step.global_step()))
/// });
/// // One of three was lost at step 5.
/// assert_eq!(outcomes.into_iter().flatten().collect::<Vec<_>>(), [(2, 10), (2, 10)]);
/// # Ok(())
/// # }
/// ```
pub struct Elastic<R: Runtime> {
    world: ElasticWorld<R>,
}

impl<R: Runtime> Elastic<R> {
    /// A rank that meets the others so.
    pub fn new(meeting: impl Rendezvous<R> + 'static) -> Self {
        Elastic { world: ElasticWorld::new(Box::new(meeting)) }
    }

    /// How many other ranks hold a copy of what this rank commits, at first 1: as many ranks can be lost at once, or as many machines with all of their ranks, where
    /// there are more. All ranks say the same. A rank needs host memory for twice its own piece and the copies that it holds: where machines have unequal numbers of
    /// ranks, those of small ones hold more.
    pub fn copies(mut self, ranks: usize) -> Self {
        self.world.placing.copies = ranks;
        self
    }

    /// The machine of this rank, where it is not the system's name: copies go to other machines as far as there are, so that one may be lost with all
    /// of its ranks.
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.world.placing.host = name.into();
        self
    }

    /// Bytes that travel at once when ranks commit, or take up a commit, at first 64 MiB: a device needs memory for twice as much. All ranks say the same.
    pub fn message_limit(mut self, bytes: usize) -> Self {
        self.world.placing.message = bytes.max(1);
        self
    }

    /// Runs the program over the world that there is, and again over the next one whenever ranks are lost or come, until it ends on all ranks of one.
    ///
    /// # Errors
    /// This rank's own, with which it leaves the run to the others: whatever the program returns that does not name another rank, and a panic. And if
    /// too few ranks are left, or too much was lost with them.
    pub fn run<T>(mut self, mut program: impl FnMut(&mut ElasticWorld<R>) -> Result<T>) -> Result<T> {
        loop {
            let comm = match self.world.meet() {
                Ok(comm) => comm,
                Err(error) => {
                    self.world.save_stranded();
                    return Err(error);
                }
            };
            let world = &mut self.world;
            let outcome = guarded(&comm, |comm| match program(world) {
                Err(error) if world.is_of_change(&error) => Ok(None),
                // A rank that left now could not go on with the others if one of them failed at the end.
                done => done.and_then(|done| comm.barrier().map(|()| Some(done))),
            });
            match outcome {
                Ok(Some(done)) => return Ok(done),
                Ok(None) => {}
                Err(error) if self.world.is_of_another(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Runs a program on ranks that are threads of this process, and gives what each came to, in the order of their seats. `options` are those of each rank.
    pub fn on_threads<T: Send>(
        seats: Vec<impl Rendezvous<R> + 'static>,
        options: impl Fn(Elastic<R>) -> Elastic<R> + Sync,
        program: impl Fn(&mut ElasticWorld<R>) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        let (options, program) = (&options, &program);
        std::thread::scope(|scope| {
            let start = |seat| scope.spawn(move || options(Elastic::new(seat)).run(program));
            let threads: Vec<_> = seats.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    }
}
