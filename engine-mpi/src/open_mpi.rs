//! The start of MPI in this process.

use std::sync::atomic::{AtomicBool, Ordering};

use engine_process::{Processes, Transport};
use numcore::{Error, Result};

use super::{launched::launcher_mismatch, library::Library};

/// True once initialisation of MPI was tried, which is possible once in a process.
static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Initialises MPI under `mpirun`, or a launcher that implements its protocol. A program started without a launcher is
/// a world of one. Dropping the result ends MPI, which blocks until all processes have dropped theirs.
///
/// After a process has died, the others can go on and [join again](Processes::rendezvous) under `mpirun --with-ft ulfm`
/// of Open MPI 5.
///
/// # Errors
/// An error if MPI was initialised before in this process or cannot be, or `mpirun` is of another installation than the
/// library.
pub fn init() -> Result<Processes> {
    if INITIALISED.swap(true, Ordering::SeqCst) {
        return Err(Error::usage(
            "engine_mpi::init",
            "MPI can be initialised once in a process, and was, or failed to be, before: share what the first call gave",
        ));
    }
    let processes = Processes::over(|| Ok(Box::new(Library::init()?) as Box<dyn Transport>))?;
    match launcher_mismatch(processes.rank(), processes.size(), |name| std::env::var(name).ok()) {
        None => Ok(processes),
        Some(why) => Err(Error::unsupported("engine_mpi::init", why)),
    }
}
