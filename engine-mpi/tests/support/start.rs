//! Ranks that are the processes of `mpirun`. Every process runs every test; what the programs of its ranks return is
//! told to all, so every assertion holds on every process.

use std::{
    io::{Write, stderr},
    sync::{Mutex, OnceLock},
    time::Duration,
};

use engine_mpi::engine_process::Processes;
pub use engine_mpi::engine_process::comm;
use numcore::{NullRuntime, Result, Runtime};

pub use self::comm::engine::Portable as Answer;
use self::comm::{
    Collectives, Comm, Places,
    engine::{Portable, guarded, with_causes},
};
use crate::ranks::Ranks;

pub fn outcomes<R: Runtime, T: Portable>(
    ranks: &Ranks,
    runtime: impl Fn(usize) -> Result<R>,
    program: impl Fn(Comm<R>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    let (mpi, _) = all();
    if ranks.size > mpi.size() {
        // More ranks than processes: threads of the first, for all.
        let own = (mpi.rank() == 0).then(|| ranks.threads().outcomes(runtime, program)).transpose()?;
        return Option::from_bytes(&tell(&own.to_bytes())[0]).map(|own| own.expect("the first process ran them"));
    }
    let members: Vec<usize> = (0..ranks.size).collect();
    let rt = runtime(mpi.rank().min(ranks.size - 1))?;
    let world = mpi.world_with(&members, &rt, ranks.timeout, ranks.places)?;
    // Deadlines are short: all begin together.
    meet();
    let own = world.map(|comm| guarded(&comm, &program));
    let told = tell(&own.to_bytes());
    let outcomes = told[..ranks.size].iter().map(|bytes| Option::<Result<T>>::from_bytes(bytes));
    let outcomes = outcomes.map(|own| Ok(own?.expect("a member of the world has an outcome")));
    Ok(with_causes(outcomes.collect::<Result<_>>()?))
}

/// Exchanges bytes among all processes. If one has failed alone, they run different tests, and all end.
fn tell(own: &[u8]) -> Vec<Vec<u8>> {
    all().1.exchange(own).unwrap_or_else(|error| diverged(&error))
}

fn diverged(error: &numcore::Error) -> ! {
    // Not `eprintln!`, which tests keep to themselves until they end.
    let _ =
        writeln!(stderr(), "processes do not run the same tests: one may have failed on some of them alone\n{error}");
    std::process::abort();
}

/// MPI in this process, until it exits, and a world in which processes tell each other what their programs returned.
fn all() -> (&'static Processes, &'static Comm<NullRuntime>) {
    static ALL: OnceLock<(&'static Processes, Comm<NullRuntime>)> = OnceLock::new();
    let (mpi, observer) = ALL.get_or_init(|| {
        let mpi: &'static Processes =
            Box::leak(Box::new(engine_mpi::init().expect("MPI is there").message_limit(1 << 20).chunk(1 << 14)));
        *MPI.lock().unwrap() = Some(mpi);
        // SAFETY: the function is of this program, and may run at its exit.
        assert_eq!(unsafe { libc::atexit(finalize) }, 0);
        let members: Vec<usize> = (0..mpi.size()).collect();
        let world = mpi.world_with(&members, &NullRuntime::new(), Duration::from_secs(300), Places::Any);
        (mpi, world.expect("a world of all").expect("with a place for this process"))
    });
    (mpi, observer)
}

static MPI: Mutex<Option<&'static Processes>> = Mutex::new(None);

extern "C" fn finalize() {
    let Ok(Some(mpi)) = MPI.lock().map(|mut own| own.take()) else { return };
    mpi.finish();
}

/// Returns when all processes have come here.
pub fn meet() {
    all().1.barrier().unwrap_or_else(|error| diverged(&error));
}

/// The prefix of names of files that processes share: the number of their one parent.
pub fn id() -> u32 {
    std::os::unix::process::parent_id()
}
