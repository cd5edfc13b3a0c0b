//! Processes that a shared folder joins, without an installed library or a listening port. Each process appends its
//! messages for another to a file.

mod log;
mod rendezvous;
mod transport;

use std::{path::PathBuf, time::Duration};

use numcore::{Error, Result};

use crate::{Launch, Processes, Transport};

/// A folder in which the processes of a job find each other and exchange messages. They are on one machine, or on
/// several with a shared file system.
///
/// The launcher gives each process its rank: Slurm's `srun`, `torchrun`, or a script that sets `RANK`, `WORLD_SIZE` and
/// `LOCAL_RANK`. A folder suits small messages: as the control plane of GPUs that exchange through NCCL, and for tests.
/// For gradients in host memory, use [`Tcp`](crate::Tcp) or MPI.
///
/// One job at a time uses a folder. Another job that starts there ends the first, and two that start at once may mix.
/// Files of an earlier job, for example one that was killed, do no harm and are deleted. Every user who may write in
/// the folder is trusted. For each direction between two ranks, the folder holds the unread messages, and at most 4 MiB
/// and one message of read ones.
///
/// A dead process is noticed within seconds by another process on its machine, which notifies the rest. If there is
/// none, it is noticed when a call that waits for it is [late](Processes::timeout). All other processes then get an
/// error.
///
/// ```
/// use engine_process::{Launch, SharedFolder, comm::{Collectives, ReduceOp}};
/// use numcore::{DType, NullRuntime, Result};
///
/// # fn main() -> Result<()> {
/// # let folder = std::env::temp_dir().join(format!("weftgrad-doc-{}", std::process::id()));
/// // Each rank is a process, usually; here both are threads of one.
/// let rank = |rank| {
///     let launch = Launch { rank, size: 2, local_rank: rank };
///     let processes = SharedFolder::new(&folder).launch(launch).join()?;
///     processes.run(|_| Ok(NullRuntime::new()), |comm| comm.exchange(&[rank as u8]))
/// };
/// let all = std::thread::scope(|scope| {
///     [0, 1].map(|r| scope.spawn(move || rank(r))).map(|thread| thread.join().unwrap())
/// });
/// for gathered in all {
///     assert_eq!(gathered?, [[0], [1]]);
/// }
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[doc(alias("FileStore"), alias("rendezvous"))]
pub struct SharedFolder {
    path: PathBuf,
    launch: Option<Launch>,
    join_timeout: Duration,
}

/// The limit of bytes in one message, which is read as a whole.
const MESSAGE: usize = 4 << 20;

impl SharedFolder {
    /// Uses a folder, which is created if it does not exist. All processes name the same folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        SharedFolder { path: path.into(), launch: None, join_timeout: Duration::from_secs(300) }
    }

    /// Sets the rank, size and local rank of this process, where the environment does not.
    pub fn launch(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Sets the time that [`join`](SharedFolder::join) waits for the other processes. The default is 5 minutes.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout;
        self
    }

    /// Blocks until all processes have come to the folder.
    ///
    /// # Errors
    /// An error if the rank of this process is unknown, or the folder cannot be written. Also if two processes have one
    /// rank, or some do not come in time. The last error names the missing ranks.
    pub fn join(self) -> Result<Processes> {
        const OP: &str = "SharedFolder::join";
        let SharedFolder { path, launch, join_timeout } = self;
        let launch = launch.or_else(Launch::from_env).ok_or_else(|| {
            let why = "the rank of this process is unknown: start all with `srun` or `torchrun`, or set RANK, WORLD_SIZE and LOCAL_RANK for each, with ranks from 0";
            Error::config(OP, "launch", why)
        })?;
        let Launch { rank, size, local_rank } = launch;
        if rank >= size {
            return Err(Error::range(OP, "rank", rank, format!("in 0..{size}")));
        }
        let open = move || Ok(Box::new(rendezvous::join(&path, rank, size, join_timeout)?) as Box<dyn Transport>);
        Ok(Processes::over(open)?.message_limit(MESSAGE).local(local_rank))
    }
}

/// The transport of one of `size` processes, once all have come.
#[cfg(test)]
pub(crate) fn transport_in(path: &std::path::Path, rank: usize, size: usize) -> Result<Box<dyn Transport>> {
    Ok(Box::new(rendezvous::join(path, rank, size, Duration::from_secs(60))?))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        fs,
        path::Path,
        sync::atomic::{AtomicU64, Ordering},
    };

    use super::*;

    /// A folder that is deleted when this is dropped.
    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new(name: &str) -> Self {
            static COUNT: AtomicU64 = AtomicU64::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("weftgrad-{name}-{}-{number}", std::process::id()));
            fs::create_dir_all(&path).expect("the folder of temporary files can be written");
            Scratch(path)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_process_that_nothing_names_is_told_what_to_set() {
        let folder = Scratch::new("unnamed");
        let beyond = Launch { rank: 2, size: 2, local_rank: 0 };
        let error = SharedFolder::new(folder.path()).launch(beyond).join().unwrap_err().to_string();
        assert!(error.contains("rank is 2, and must be in 0..2"), "{error}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_that_names_it() {
        let folder = Scratch::new("file");
        let file = folder.path().join("file");
        fs::write(&file, b"x").unwrap();
        let alone = Launch { rank: 0, size: 1, local_rank: 0 };
        let error = SharedFolder::new(&file).launch(alone).join().unwrap_err().to_string();
        assert!(error.contains(&file.display().to_string()), "{error}");
    }
}
