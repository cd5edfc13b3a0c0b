//! Running a program over one world after another.

use std::panic::resume_unwind;

use numcore::{Result, Runtime};

use super::ElasticWorld;
use distributed::comm::{Collectives, Rendezvous, engine::guarded};

/// A rank of a run whose set of ranks may change.
///
/// ```
/// use adaptive::elastic::Elastic;
/// use distributed::{
///     comm::{Communicator, Quorum, ThreadRendezvous},
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
    /// Makes a rank that meets the others by `rendezvous`.
    pub fn new(rendezvous: impl Rendezvous<R> + 'static) -> Self {
        Elastic { world: ElasticWorld::new(Box::new(rendezvous)) }
    }

    /// Sets the number of other ranks that hold a copy of this rank's commits, by default 1. As many ranks can be lost
    /// at once, or as many machines with all of their ranks, if there are more machines. Must be equal on all ranks. A
    /// rank needs host memory for twice the sum of its own piece and the copies it holds. With uneven numbers of ranks,
    /// those of small machines hold more.
    pub fn copies(mut self, ranks: usize) -> Self {
        self.world.placing.copies = ranks;
        self
    }

    /// Sets the name of this rank's machine, by default the system's host name. Copies go to other machines as far as
    /// there are, so that one can be lost with all of its ranks.
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.world.placing.host = name.into();
        self
    }

    /// Sets the bytes of a message when ranks commit or restore, by default 64 MiB: a device needs memory for two. Must
    /// be equal on all ranks.
    pub fn message_limit(mut self, bytes: usize) -> Self {
        self.world.placing.message = bytes.max(1);
        self
    }

    /// Runs the program over the present world, and again over the next whenever ranks are lost or join. Returns when
    /// it has ended on all ranks of a world.
    ///
    /// # Errors
    /// This rank's own error, with which it leaves the run to the others. It is any error of the program that does not
    /// name another rank, or a panic. Also fails if too few ranks are left, or too much state was lost with them.
    pub fn run<T>(mut self, mut program: impl FnMut(&mut ElasticWorld<R>) -> Result<T>) -> Result<T> {
        loop {
            let comm = match self.world.next() {
                Ok(comm) => comm,
                Err(error) => {
                    self.world.save_orphaned();
                    return Err(error);
                }
            };
            let world = &mut self.world;
            let outcome = guarded(&comm, |comm| match program(world) {
                Err(error) if world.is_of_change(&error) => Ok(None),
                // A rank that left before this could not go on with the others if one of them failed at the end.
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

    /// Runs a program on ranks that are threads of this process; returns their results in the order of seats. `options`
    /// configures each rank.
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
