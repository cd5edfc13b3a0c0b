//! The thread that writes an event file.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use numcore::{Error, Result};

/// The number of records that may wait to be written.
const QUEUE: usize = 1000;
/// The longest time that written bytes may stay in memory.
const FLUSH: Duration = Duration::from_secs(2);

/// A file that a thread of its own writes. Dropping it writes the rest.
#[derive(Debug)]
pub(super) struct EventThread {
    path: PathBuf,
    /// The queue to the thread; none once the thread is to end.
    queue: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
    failed: Failure,
}

#[derive(Debug)]
enum Order {
    Write(Vec<u8>),
    /// An order to write everything, then answer.
    Flush(SyncSender<()>),
}

/// The reason for which the thread ended, if it did.
type Failure = Arc<Mutex<Option<(io::ErrorKind, String)>>>;

impl EventThread {
    pub(super) fn start(file: impl Write + Send + 'static, path: PathBuf) -> Result<Self> {
        let (queue, orders) = sync_channel(QUEUE);
        let failed = Failure::default();
        let report = Arc::clone(&failed);
        let work = move || {
            let mut waiting = None;
            if let Err(error) = run(BufWriter::new(file), &orders, &mut waiting) {
                // The reason is stored before the queue closes and the waiting callers wake, so that they find it.
                *report.lock().unwrap_or_else(PoisonError::into_inner) = Some((error.kind(), error.to_string()));
            }
        };
        let thread = thread::Builder::new().name("tensorboard".into()).spawn(work).map_err(|e| Error::io(&path, e))?;
        Ok(EventThread { path, queue: Some(queue), thread: Some(thread), failed })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Queues `bytes` for the thread to write; waits while it is far behind.
    pub(super) fn put(&self, bytes: Vec<u8>) -> Result<()> {
        self.send(Order::Write(bytes))
    }

    /// Returns when everything is written.
    pub(super) fn flush(&self) -> Result<()> {
        let (answer, answered) = sync_channel(1);
        self.send(Order::Flush(answer))?;
        answered.recv().map_err(|_| self.failure())
    }

    fn send(&self, order: Order) -> Result<()> {
        let sent = self.queue.as_ref().map(|queue| queue.send(order));
        if let Some(Ok(())) = sent { Ok(()) } else { Err(self.failure()) }
    }

    fn failure(&self) -> Error {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let (kind, why) =
            failed.clone().unwrap_or((io::ErrorKind::BrokenPipe, "the thread that writes it ended".into()));
        Error::io(&self.path, io::Error::new(kind, why))
    }
}

impl Drop for EventThread {
    fn drop(&mut self) {
        self.queue = None;
        // A panic of the thread was reported there.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes until all senders are gone. After an error, `waiting` holds the channel of the caller that waits for an
/// answer.
fn run(mut file: impl Write, orders: &Receiver<Order>, waiting: &mut Option<SyncSender<()>>) -> io::Result<()> {
    let mut flushed = Instant::now();
    loop {
        match orders.recv_timeout(FLUSH.saturating_sub(flushed.elapsed())) {
            Ok(Order::Write(bytes)) => file.write_all(&bytes)?,
            Ok(Order::Flush(answer)) => {
                let answer = waiting.insert(answer);
                file.flush()?;
                // The caller may not wait any more.
                let _ = answer.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return file.flush(),
        }
        if flushed.elapsed() >= FLUSH {
            file.flush()?;
            flushed = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `self.0` bytes, then has no space left.
    struct Disk(usize);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_an_error_with_the_path_from_then_on() {
        let writer = EventThread::start(Disk(10), "runs/a/events".into()).unwrap();
        writer.put(vec![1; 100]).unwrap();
        for error in [writer.flush().unwrap_err(), writer.flush().unwrap_err(), writer.put(vec![1]).unwrap_err()] {
            let error = error.to_string();
            assert!(error.starts_with("runs/a/events: ") && error.contains("no storage space"), "{error}");
        }
    }

    #[test]
    fn nothing_is_dropped() {
        let disk = Shared::default();
        let writer = EventThread::start(disk.clone(), "x".into()).unwrap();
        let whole: Vec<u8> = (0..5000u32).flat_map(u32::to_le_bytes).collect();
        whole.chunks(4).for_each(|part| writer.put(part.to_vec()).unwrap());
        drop(writer);
        assert_eq!(*disk.0.lock().unwrap(), whole);
    }

    #[test]
    fn flushed_is_written() {
        let disk = Shared::default();
        let writer = EventThread::start(disk.clone(), "x".into()).unwrap();
        for i in 0..3 {
            writer.put(vec![i]).unwrap();
            writer.flush().unwrap();
            assert_eq!(disk.0.lock().unwrap().len(), usize::from(i) + 1);
        }
    }
}
