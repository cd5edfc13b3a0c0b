//! `Ranks` that a shared folder joins, each of which is a thread here.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use engine_process::{
    Launch, SharedFolder,
    comm::{
        Comm, Places,
        engine::{all_or_first_error, guarded, with_causes},
    },
};
use numcore::{Result, Runtime};

/// What tests know of a world: as `comm::Ranks`.
#[derive(Clone, Debug)]
pub struct Ranks {
    size: usize,
    timeout: Duration,
    places: Places,
}

impl Ranks {
    pub fn new(size: usize) -> Self {
        Ranks { size, timeout: Duration::from_secs(60), places: Places::Same }
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub fn any_place(mut self) -> Self {
        self.places = Places::Any;
        self
    }

    pub fn run<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        all_or_first_error(self.outcomes(runtime, program)?)
    }

    pub fn outcomes<R: Runtime, T: Send>(
        &self,
        runtime: impl Fn(usize) -> Result<R>,
        program: impl Fn(Comm<R>) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        let runtimes = (0..self.size).map(runtime).collect::<Result<Vec<R>>>()?;
        let (folder, program) = (Folder::new(), &program);
        let rank = |(rank, rt): (usize, R)| {
            let folder = SharedFolder::new(&folder.0);
            move || {
                let launch = Launch { rank, size: self.size, local_rank: rank };
                let processes = folder.launch(launch).join()?.message_limit(1 << 20).chunk(1 << 14);
                let all: Vec<usize> = (0..self.size).collect();
                let world = processes.world_with(&all, &rt, self.timeout, self.places)?;
                guarded(&world.expect("all ranks are members"), program)
            }
        };
        let outcomes = thread::scope(|scope| {
            let ranks: Vec<_> = runtimes.into_iter().enumerate().map(|own| scope.spawn(rank(own))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("programs are guarded")).collect()
        });
        Ok(with_causes(outcomes))
    }
}

/// A folder that is deleted in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static FOLDERS: AtomicU64 = AtomicU64::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        Folder(std::env::temp_dir().join(format!("weftgrad-ranks-{}-{number}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
