//! Ranks that a shared folder joins, each of which is a thread here.

use std::sync::atomic::{AtomicU64, Ordering};

pub use std::marker::Send as Answer;

pub use engine_process::comm;
use engine_process::{Launch, SharedFolder};
use numcore::{NullRuntime, Result, Runtime};

use self::comm::{Comm, engine::guarded};
use crate::ranks::Ranks;

use self::folders::Folder;

#[allow(dead_code, reason = "other programs use the rest")]
#[path = "../../../data/tests/common/mod.rs"]
mod folders;

pub fn outcomes<R: Runtime, T: Send>(
    ranks: &Ranks,
    runtime: impl Fn(usize) -> Result<R> + Sync,
    program: impl Fn(Comm<R>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    static FOLDERS: AtomicU64 = AtomicU64::new(0);
    let folder = Folder::new(&format!("ranks-{}", FOLDERS.fetch_add(1, Ordering::Relaxed)));
    let rank = |thread: Comm<NullRuntime>| {
        let (rank, size) = (thread.rank(), thread.size());
        // It could tell the others of a failure beside the folder.
        drop(thread);
        let processes = SharedFolder::new(folder.as_ref()).launch(Launch { rank, size, local_rank: rank }).join()?;
        let (processes, all) = (processes.message_limit(1 << 20).chunk(1 << 14), Vec::from_iter(0..size));
        let world = processes.world_with(&all, &runtime(rank)?, ranks.timeout, ranks.places)?;
        guarded(&world.expect("all ranks are members"), &program)
    };
    ranks.threads().outcomes(|_| Ok(NullRuntime::new()), rank)
}
