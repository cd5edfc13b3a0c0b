//! Reading of files at an offset.

use std::{
    fs::File,
    io::{self, Error},
    num::NonZero,
    sync::OnceLock,
    thread,
};

/// The bytes that are worth a thread: reading them from the page cache takes ten times as long as starting it.
const PART: usize = 1 << 20;
/// The largest number of threads that read together; fewer already saturate the memory's bandwidth.
const MOST: usize = 8;

/// Fills `into` with the bytes of a file from `offset` on. The file's own position is not used, so threads need no
/// lock. Large reads are divided among threads: one thread cannot copy from the page cache into fresh memory at full
/// bandwidth.
///
/// # Errors
/// Fails if reading fails, or if the file ends before `into` is full.
pub fn read_exact_at(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    let threads = (into.len() / PART).min(processors());
    if threads < 2 {
        return read_part(file, offset, into);
    }
    let size = into.len().div_ceil(threads);
    thread::scope(|scope| {
        let read = |(i, part)| scope.spawn(move || read_part(file, offset + (i * size) as u64, part));
        let parts: Vec<_> = into.chunks_mut(size).enumerate().map(read).collect();
        let ended =
            |part: thread::ScopedJoinHandle<'_, _>| part.join().map_err(|_| Error::other("a thread panicked"))?;
        parts.into_iter().try_for_each(ended)
    })
}

/// The number of threads that may read; queried once, since the query reads files of the system.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get).min(MOST))
}

#[cfg(unix)]
fn read_part(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
fn read_part(file: &File, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !into.is_empty() {
        match file.seek_read(into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                into = &mut into[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_is_read_as_little_is() {
        let path = std::env::temp_dir().join(format!("weftgrad-positioned-{}", std::process::id()));
        let bytes: Vec<u8> = (0..5 * PART + 3).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).expect("a file is written");
        let file = File::open(&path).expect("it is opened");
        for (from, len) in [(0, 0), (3, 7), (0, bytes.len()), (1, bytes.len() - 1), (PART, 2 * PART + 1)] {
            let mut into = vec![0; len];
            read_exact_at(&file, from as u64, &mut into).expect("it is read");
            assert!(into == bytes[from..from + len], "{len} bytes from {from} on");
        }
        let mut more = vec![0; bytes.len()];
        let ended = read_exact_at(&file, 1, &mut more).expect_err("the file ends before");
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        std::fs::remove_file(&path).expect("it is removed");
    }
}
