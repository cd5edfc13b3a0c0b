//! The launcher of a program's ranks as processes of this machine.
//!
//! [`Job`] starts one process for each rank, with the variables of torchrun in its environment, passes their lines on,
//! and ends all of them together. The program `weftgrad-run` is this crate on the command line; `weftgrad`'s `Launcher`
//! lets a program start itself. `README.md` describes the design.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

#[cfg(unix)]
mod environment;
#[cfg(unix)]
mod init;
mod job;
#[cfg(unix)]
mod lines;
#[cfg(unix)]
mod process;
#[cfg(unix)]
mod supervisor;

#[cfg(unix)]
pub use init::run_below_init;
pub use job::Job;
#[cfg(unix)]
pub use process::{become_rank, end_with_launcher};

impl Job {
    /// Starts the ranks, and blocks until all have ended. Returns the exit status for this process: 0, or that of the
    /// first rank that failed. A rank that was killed by a signal has 128 and the signal's number.
    ///
    /// # Errors
    /// An error if the description contradicts itself, or a process cannot be started. On several nodes also if the
    /// environment has no secret.
    #[cfg(unix)]
    pub fn run(&self) -> std::io::Result<u8> {
        self.check()?;
        supervisor::run(self)
    }

    /// Returns an error: processes are launched on Unix alone.
    ///
    /// # Errors
    /// An error that names the ways to have ranks without this launcher.
    #[cfg(not(unix))]
    pub fn run(&self) -> std::io::Result<u8> {
        let why = "processes are launched on Unix alone: let ranks be threads, or start each with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set";
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why))
    }
}
