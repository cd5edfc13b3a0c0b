//! Frames: headers, and the payloads that are under way.

use std::{
    io::{self, ErrorKind},
    ptr, slice,
};

use crate::Channel;

pub(super) const HEADER: usize = 16;
/// The bytes after which a turn at one connection ends.
pub(super) const TURN: usize = 4 << 20;
/// The first byte of each header; a stream that has lost its frames is found by it.
pub(super) const MARK: u8 = 0xf7;

/// The kind of a frame, by its number.
pub(super) const CONTROL: u8 = 0;
pub(super) const DATA: u8 = 1;
/// A receive of this tag waits, or waits no longer.
pub(super) const READY: u8 = 2;
pub(super) const UNREADY: u8 = 3;
pub(super) const HEARTBEAT: u8 = 4;
/// The sender writes nothing more; the answer is that everything has been read.
pub(super) const GOODBYE: u8 = 5;
pub(super) const HEARD: u8 = 6;
/// A message of this tag waits for its receive. The length is that of the message, with the channel in the lowest bit.
pub(super) const OFFER: u8 = 7;
/// The receive of the first offered message of this tag is shorter. The length is that of the receive, as in an offer.
pub(super) const TOO_LONG: u8 = 8;
/// A word by which a [lender](super::lent) makes itself known, its number as the tag; the answer if it can be read.
pub(super) const LENDER: u8 = 9;
pub(super) const READS: u8 = 10;
/// The address of the next message that is lent, and that message, like an offer.
pub(super) const ADDRESS: u8 = 11;
pub(super) const LENT: u8 = 12;
/// The answer to a message that is lent, with its number as the tag. The length is 0 if it was copied, or one more than
/// that of a receive which is shorter.
pub(super) const TAKEN: u8 = 13;
/// The answer to a message that cannot be copied, with its number as the tag, and the bytes of that message.
pub(super) const UNREAD: u8 = 14;
pub(super) const RESENT: u8 = 15;

/// The reason that nothing more comes from the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LinkEnded {
    /// It left after its last message.
    Left,
    /// The connection was closed, as the system does when a process dies.
    Dead,
    Broken(String),
}

/// A message to be sent: its payload stays in the caller's memory.
pub(super) struct Outgoing {
    pub(super) header: [u8; HEADER],
    pub(super) from: *const u8,
    pub(super) bytes: usize,
    /// The bytes of header and payload that are written.
    pub(super) written: usize,
    /// The request; none for frames of the link itself.
    pub(super) request: Option<usize>,
}

/// A receive without its message so far.
pub(super) struct TcpReceive {
    pub(super) on: u8,
    pub(super) tag: u32,
    pub(super) request: usize,
    pub(super) into: *mut u8,
    pub(super) room: usize,
}

/// The payload that is being read.
pub(super) struct Incoming {
    pub(super) target: PayloadTarget,
    pub(super) read: usize,
    pub(super) bytes: usize,
}

pub(super) enum PayloadTarget {
    InPlace { request: usize, into: *mut u8 },
    Stash { on: u8, tag: u32, payload: Vec<u8> },
    Nowhere,
}

/// A message without a receive.
pub(super) enum Stashed {
    Here(Vec<u8>),
    /// One that is in the memory of its sender.
    Lent(LentMessage),
}

/// A message that is copied to its receive from the memory of its sender.
pub(super) struct LentCopy {
    pub(super) receive: TcpReceive,
    pub(super) message: LentMessage,
    /// The bytes that are there.
    pub(super) copied: usize,
}

/// A message in the memory of its sender.
#[derive(Clone, Copy)]
pub(super) struct LentMessage {
    pub(super) number: u32,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// A request that has ended, with the bytes that arrived or the reason that it failed.
pub(super) type Outcome = (usize, Result<usize, String>);

impl Outgoing {
    /// A frame of the link itself, which has no payload.
    pub(super) fn of_link(header: [u8; HEADER]) -> Self {
        Outgoing { header, from: ptr::null(), bytes: 0, written: 0, request: None }
    }

    pub(super) fn address(&self) -> (u8, u32) {
        let [kind, _, _, _, a, b, c, d, ..] = self.header;
        (kind, u32::from_le_bytes([a, b, c, d]))
    }
}

impl Incoming {
    /// Takes what the payload lacks from the front of `bytes`, and returns how much that was.
    pub(super) fn take(&mut self, bytes: &[u8]) -> usize {
        let Incoming { target, read, bytes: all } = self;
        let bytes = &bytes[..bytes.len().min(*all - *read)];
        match target {
            // SAFETY: the receiver promises at least `all` bytes until the request has ended; `bytes` is the buffer.
            PayloadTarget::InPlace { into, .. } => unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr(), into.add(*read), bytes.len());
            },
            PayloadTarget::Stash { payload, .. } => payload[*read..][..bytes.len()].copy_from_slice(bytes),
            PayloadTarget::Nowhere => {}
        }
        *read += bytes.len();
        bytes.len()
    }
}

/// The bytes at an address, which may be anything if there are none.
///
/// # Safety
/// The bytes are there, initialised and unchanged, as long as the slice is used.
pub(super) unsafe fn part<'a>(from: *const u8, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    if bytes == 0 { &[] } else { unsafe { slice::from_raw_parts(from, bytes) } }
}

pub(super) fn header(kind: u8, tag: u32, length: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    [header[0], header[1]] = [kind, MARK];
    header[4..8].copy_from_slice(&tag.to_le_bytes());
    header[8..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// A length, with the channel in the lowest bit.
pub(super) fn with_channel(length: usize, on: u8) -> usize {
    length << 1 | usize::from(on)
}

pub(super) fn kind(on: Channel) -> u8 {
    if on == Channel::Control { CONTROL } else { DATA }
}

pub(super) fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
}

pub(super) fn too_long(came: usize, due: usize) -> String {
    format!(
        "a message of {came} bytes came where {due} were due: all processes must have equal `Processes::message_limit`"
    )
}
