//! Ranks that TCP joins, each of which is a thread here.

use std::{
    net::{SocketAddr, TcpListener},
    sync::atomic::{AtomicU64, Ordering},
};

pub use std::marker::Send as Answer;

pub use engine_process::comm;
use engine_process::{Launch, Tcp};
use numcore::{NullRuntime, Result, Runtime};

use self::comm::{Comm, engine::guarded};
use crate::ranks::Ranks;

/// The number of jobs so far.
static JOBS: AtomicU64 = AtomicU64::new(1);

pub fn outcomes<R: Runtime, T: Send>(
    ranks: &Ranks,
    runtime: impl Fn(usize) -> Result<R> + Sync,
    program: impl Fn(Comm<R>) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    // If another job gets the same port, they meet there in turn.
    let (job, port) = (JOBS.fetch_add(1, Ordering::Relaxed), free_port());
    let rank = |thread: Comm<NullRuntime>| {
        let (rank, size) = (thread.rank(), thread.size());
        // It could tell the others of a failure beside the connections.
        drop(thread);
        let launch = Launch { rank, size, local_rank: rank };
        let processes =
            Tcp::from(SocketAddr::from(([127, 0, 0, 1], port))).launch(launch).job(job.to_string()).join()?;
        let (processes, all) = (processes.message_limit(1 << 20).chunk(1 << 14), Vec::from_iter(0..size));
        let world = processes.world_with(&all, &runtime(rank)?, ranks.timeout, ranks.places)?;
        guarded(&world.expect("all ranks are members"), &program)
    };
    ranks.threads().outcomes(|_| Ok(NullRuntime::new()), rank)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}
