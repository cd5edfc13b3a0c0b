//! Memory that processes of one host lend to each other, so that a long message is copied once, and by no socket.
//!
//! The lender sends the address of a message in place of its bytes, and the receiver copies them from there by the
//! system's `process_vm_readv`. That is allowed to processes that may trace each other. A container or a policy may
//! forbid it, and the number of a process may be that of another one in another namespace. So the lender first tells a
//! random token and its place: only who finds it there reads from that process.
//!
//! The token is read again behind each part of a message. The lender removes it before the memory of any message is
//! used again after the end of the connection. So a process that was stopped meanwhile takes nothing for a message.
//!
//! A message that cannot be copied, because a policy has changed for example, is asked for. The lender then sends its
//! bytes over the connection, and those of all later messages.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use super::frame::LentMessage;

/// The words of a token.
const TOKEN: usize = 4;
/// The words by which a lender makes itself known: process, place of the token, and the token.
const WORDS: usize = 2 + TOKEN;

/// Both directions of lending between two processes: nothing, until they have begun.
#[derive(Default)]
pub(super) struct Lending {
    lender: Option<Lender>,
    /// The words of the other process so far, and its memory once all have come.
    words: [u64; WORDS],
    heard: usize,
    memory: Option<LentMemory>,
    /// The reason that the other process cannot be read, since a message could not be copied or from the beginning.
    why_unread: Option<String>,
    /// The address of the next message that the other process lends, and its number.
    pub(super) address: u64,
    number: u32,
}

impl Lending {
    /// Begins to lend; returns the words for the other process, if the system can do it.
    pub(super) fn begin(&mut self) -> Option<[u64; WORDS]> {
        self.lender = Lender::new();
        self.lender.as_ref().map(Lender::words)
    }

    /// Tells whether this process lends.
    pub(super) fn lends(&self) -> bool {
        self.lender.is_some()
    }

    /// Takes a word of the other process, which says each once and in order. Returns true if it was the last one, and
    /// that process can be read.
    pub(super) fn hear(&mut self, number: usize, word: u64) -> Result<bool, String> {
        let place = self.words.get_mut(number).filter(|_| number == self.heard);
        *place.ok_or_else(|| format!("it has a word {number} as a lender, behind {} others", self.heard))? = word;
        self.heard += 1;
        if self.heard == WORDS {
            match LentMemory::find(self.words) {
                Ok(memory) => self.memory = Some(memory),
                Err(error) => self.why_unread = Some(error.to_string()),
            }
        }
        Ok(self.memory.is_some())
    }

    /// Tells whether this process reads the memory of the other.
    pub(super) fn reads(&self) -> bool {
        self.memory.is_some() && self.why_unread.is_none()
    }

    /// The reason that messages of the other process are not copied any more, if they were so far.
    pub(super) fn why_given_up(&self) -> Option<&str> {
        self.why_unread.as_deref().filter(|_| self.memory.is_some())
    }

    /// The next message, of this length.
    ///
    /// # Errors
    /// An error if the other process was never told that it can be read.
    pub(super) fn next(&mut self, bytes: usize) -> Result<LentMessage, String> {
        if self.memory.is_none() {
            let why = self.why_unread.as_deref().unwrap_or("it has not said where it is");
            return Err(format!("it lends a message, though this process cannot read its memory: {why}"));
        }
        let number = self.number;
        self.number = number.wrapping_add(1);
        Ok(LentMessage { number, address: self.address, bytes })
    }

    /// Copies a part of a message from an address.
    ///
    /// # Errors
    /// The system's error, or the one after which nothing is read any more.
    pub(super) fn copy(&self, address: u64, into: &mut [u8]) -> Result<(), String> {
        match (&self.memory, &self.why_unread) {
            (Some(memory), None) => memory.copy(address as usize, into).map_err(|error| error.to_string()),
            (_, why) => Err(why.clone().unwrap_or_default()),
        }
    }

    /// Reads no memory any more, for a reason. Returns true if this process did so far.
    pub(super) fn give_up(&mut self, why: String) -> bool {
        let reads = self.reads();
        self.why_unread.get_or_insert(why);
        reads
    }

    /// Forbids the reading of the other process, as the system may do at any time.
    #[cfg(test)]
    pub(super) fn forbid(&mut self) {
        self.memory.iter_mut().for_each(|memory| memory.process = i32::MAX);
    }

    /// Ends the lending of this process.
    pub(super) fn end(&mut self) {
        self.lender = None;
    }
}

/// The right of another process to read the memory of this one. Dropping it ends that.
struct Lender {
    // A box of its own: its place does not change, and no memory that was sent is beside it.
    token: Box<[AtomicU64; TOKEN]>,
}

impl Lender {
    /// Makes a lender; none on systems without the call.
    fn new() -> Option<Self> {
        let mut words = [0; TOKEN];
        for word in &mut words {
            *word = getrandom::u64().ok()?;
        }
        system::allow_siblings().then(|| Lender { token: Box::new(words.map(AtomicU64::new)) })
    }

    /// The words for the other process.
    fn words(&self) -> [u64; WORDS] {
        let [a, b, c, d] = std::array::from_fn(|k| self.token[k].load(Ordering::Relaxed));
        [std::process::id().into(), self.token.as_ptr() as u64, a, b, c, d]
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.token.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        // No write to memory that was lent, which may follow, comes before that.
        fence(Ordering::SeqCst);
    }
}

/// The memory of a process that lends it to this one.
struct LentMemory {
    process: i32,
    token_at: usize,
    token: [u8; 8 * TOKEN],
}

impl LentMemory {
    /// Finds the lender that has told these words.
    ///
    /// # Errors
    /// An error if it is not there, or may not be read.
    fn find(words: [u64; WORDS]) -> io::Result<Self> {
        let [process, token_at, token @ ..] = words;
        let process = i32::try_from(process).map_err(io::Error::other)?;
        let token_at = usize::try_from(token_at).map_err(io::Error::other)?;
        let mut bytes = [0; 8 * TOKEN];
        bytes.chunks_exact_mut(8).zip(token).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        let memory = LentMemory { process, token_at, token: bytes };
        memory.copy(token_at, &mut []).map(|()| memory)
    }

    /// Copies bytes from an address of the lender.
    ///
    /// # Errors
    /// An error if the lender has ended, or lends no more: the bytes are arbitrary then.
    fn copy(&self, from: usize, into: &mut [u8]) -> io::Result<()> {
        let mut found = [0; 8 * TOKEN];
        let (bytes, remote) = (into.len() + found.len(), [(from, into.len()), (self.token_at, found.len())]);
        let copied = system::copy(self.process, remote, [into, &mut found])?;
        let is_its = copied == bytes && found == self.token;
        if is_its { Ok(()) } else { Err(io::Error::new(io::ErrorKind::BrokenPipe, "the process lends no more")) }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::io::{self, IoSliceMut};

    use nix::{
        sys::uio::{RemoteIoVec, process_vm_readv},
        unistd::{Pid, getppid},
    };

    /// Lets the other ranks, which have the same parent, read the memory of this process where Yama asks for that. The
    /// descendants of the first process are no siblings but everybody.
    pub(super) fn allow_siblings() -> bool {
        let parent = getppid().as_raw();
        if parent > 1 {
            // SAFETY: the call sets a property of this process and reads no memory. Without Yama it is an error.
            let _ = unsafe { libc::prctl(libc::PR_SET_PTRACER, parent, 0, 0, 0) };
        }
        true
    }

    /// Copies pieces of the memory of a process, and returns the number of bytes.
    pub(super) fn copy(process: i32, from: [(usize, usize); 2], into: [&mut [u8]; 2]) -> io::Result<usize> {
        let from = from.map(|(base, len)| RemoteIoVec { base, len });
        Ok(process_vm_readv(Pid::from_raw(process), &mut into.map(IoSliceMut::new), &from)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;

    pub(super) fn allow_siblings() -> bool {
        false
    }

    pub(super) fn copy(_: i32, _: [(usize, usize); 2], _: [&mut [u8]; 2]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_is_lent_until_its_lender_ends() {
        let lender = Lender::new().unwrap();
        let (words, message) = (lender.words(), [7u8; 1000]);
        let mut copied = [0; 1000];
        let memory = LentMemory::find(words).expect("this process may read its own memory");
        memory.copy(message.as_ptr() as usize, &mut copied).unwrap();
        assert_eq!(copied, message);
        assert!(memory.copy(8, &mut copied).is_err());
        // Other processes, other places and other tokens are no lenders.
        for k in 0..WORDS {
            let mut other = words;
            other[k] ^= 64;
            assert!(LentMemory::find(other).is_err(), "word {k}");
        }
        drop(lender);
        assert!(memory.copy(message.as_ptr() as usize, &mut copied).is_err());
    }
}
