//! Measures the rate at which a loader reads tokens: `cargo run --release -p weftgrad-data --example throughput -- FILE
//! [CONTEXT]`.
//!
//! FILE has `u16` tokens; 20 MB are enough. One reading brings it into the page cache. Then windows are read in order,
//! and a loader makes batches of inputs and targets on this thread, in order and at random. Each thread of a loader
//! does this work. Finally all is repeated from memory.
#![forbid(unsafe_code)]

use std::{
    sync::{Arc, LazyLock},
    time::Instant,
};

use data::{
    Dataset, Loader,
    tokens::{TokenFile, TokenSource, TokenType, TokenWindows, next_tokens},
};
use numcore::{Error, Result};

const BATCH: usize = 32;
const PASSES: usize = 15;
static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or_else(|| Error::argument("throughput", "give a file of u16 tokens"))?;
    let context = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1024);
    let open = || TokenFile::open(&path, TokenType::U16);
    for file in [open()?, open()?.in_memory()?].map(Arc::new) {
        measured(&path, file, context)?;
    }
    Ok(())
}

fn measured(path: &str, file: Arc<TokenFile>, context: usize) -> Result<()> {
    let windows = TokenWindows::new(Arc::clone(&file), context)?;
    println!("{path}: {} tokens, windows of {context}", TokenSource::len(&*file));
    for start in (0..TokenSource::len(&*file)).step_by(1 << 20) {
        file.tokens(start, (TokenSource::len(&*file) - start).min(1 << 20) as usize)?;
    }
    let tokens = windows.len() * context;
    timed("windows in order", tokens, || (0..windows.len()).try_for_each(|i| windows.get(i).map(drop)))?;
    for shuffled in [false, true] {
        let loader = Loader::new(windows.clone()).batch(BATCH).workers(0).collate(next_tokens);
        let (loader, name) =
            if shuffled { (loader.shuffle(7), "batches, shuffled") } else { (loader, "batches in order") };
        timed(name, tokens, || loader.epoch(0)?.try_for_each(|batch| batch.map(drop)))?;
    }
    Ok(())
}

/// Prints the bytes of tokens per second over several passes: the system counts a thread's time by ticks.
fn timed(name: &str, tokens: usize, work: impl Fn() -> Result<()>) -> Result<()> {
    let begun = now();
    (0..PASSES).try_for_each(|_| work())?;
    let seconds = now() - begun;
    println!("{name:20} {:6.2} GB/s of tokens", 2e-9 * (PASSES * tokens) as f64 / seconds);
    Ok(())
}

/// Seconds of processor time of this thread, if Linux reports them; otherwise seconds since the start.
fn now() -> f64 {
    let ran = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = ran.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| BEGUN.elapsed().as_secs_f64(), |nanoseconds| 1e-9 * nanoseconds)
}
