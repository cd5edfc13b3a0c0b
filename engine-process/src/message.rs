//! Messages that ranks exchange beside the data, and their wire form.

use std::sync::Arc;

use comm::{
    Fingerprint,
    engine::{Failure, WireReader, Writer},
};
use numcore::{Error, Result};

/// The identity of a group: the number of its world in the process, then the number and color of each split. Every
/// member derives it by itself, without a message.
pub(crate) type GroupId = Arc<[u64]>;

/// The identity of a call in its group. Calls of the whole group share one count; transfers between two ranks have a
/// count per pair and direction. Ranks are those of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    All(u64),
    Pair { from: usize, to: usize, number: u64 },
}

impl Key {
    pub(crate) fn number(self) -> u64 {
        match self {
            Key::All(number) | Key::Pair { number, .. } => number,
        }
    }
}

/// The description of a call that a rank sends to every other participant before data moves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header {
    pub(crate) group: GroupId,
    pub(crate) key: Key,
    /// The first tag of the messages from the sender of this header to its receiver.
    pub(crate) tag: u32,
    pub(crate) call: Fingerprint,
    /// The number of elements that the sender will send to the receiver, for collectives in which every pair has its
    /// own length.
    pub(crate) elements: usize,
    /// Bytes that travel with the header: all the data of an exchange of bytes.
    pub(crate) payload: Vec<u8>,
}

/// A message between two processes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Message {
    /// The header of a call that the sender makes.
    Call(Header),
    /// The sender has dropped its last handle of a group.
    Leave(GroupId),
    /// A world has failed, with the reason.
    Fail(u64, Failure),
    /// The sender will start no more calls.
    Goodbye,
    /// The sender recovers a world of the survivors. `made` is the number of worlds it has made, `dead` the processes
    /// it knows to be dead or ended.
    Recover { made: u64, dead: Vec<usize> },
}

impl Message {
    /// The number of the world that the message belongs to, if there is one.
    pub(crate) fn world(&self) -> Option<u64> {
        match self {
            Message::Call(header) => Some(world_of(&header.group)),
            Message::Leave(group) => Some(world_of(group)),
            Message::Fail(world, _) => Some(*world),
            Message::Goodbye | Message::Recover { .. } => None,
        }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Message::Call(header) => write_header(w.u8(0), header),
            Message::Leave(group) => write_group(w.u8(1), group),
            Message::Fail(world, failure) => failure.write(w.u8(2).u64(*world)),
            Message::Goodbye => {
                w.u8(3);
            }
            Message::Recover { made, dead } => {
                w.u8(4).u64(*made).list(dead);
            }
        }
        w.finish()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Message> {
        let mut r = WireReader::new(bytes);
        let message = match r.u8()? {
            0 => Message::Call(read_header(&mut r)?),
            1 => Message::Leave(read_group(&mut r)?),
            2 => Message::Fail(r.u64()?, Failure::read(&mut r)?),
            3 => Message::Goodbye,
            4 => Message::Recover { made: r.u64()?, dead: r.list()? },
            kind => return Err(Error::format("message", format!("no message is of kind {kind}"))),
        };
        r.finish()?;
        Ok(message)
    }
}

fn write_header(w: &mut Writer, header: &Header) {
    write_group(w, &header.group);
    match header.key {
        Key::All(number) => w.u8(0).u64(number),
        Key::Pair { from, to, number } => w.u8(1).u64(number).usize(from).usize(to),
    };
    w.u64(header.tag.into()).usize(header.elements).bytes(&header.call.to_bytes()).bytes(&header.payload);
}

fn read_header(r: &mut WireReader<'_>) -> Result<Header> {
    let group = read_group(r)?;
    let key = match (r.u8()?, r.u64()?) {
        (0, number) => Key::All(number),
        (_, number) => Key::Pair { number, from: r.usize()?, to: r.usize()? },
    };
    let (tag, elements) = (r.u64()?, r.usize()?);
    let tag = u32::try_from(tag).map_err(|_| Error::format("message", format!("no tag is {tag}")))?;
    let (call, payload) = (Fingerprint::from_bytes(r.bytes()?)?, r.bytes()?.to_vec());
    Ok(Header { group, key, tag, call, elements, payload })
}

fn write_group(w: &mut Writer, group: &GroupId) {
    w.usize(group.len());
    group.iter().for_each(|&part| {
        w.u64(part);
    });
}

/// The number of the world of a group.
pub(crate) fn world_of(group: &GroupId) -> u64 {
    group.first().copied().unwrap_or_default()
}

fn read_group(r: &mut WireReader<'_>) -> Result<GroupId> {
    let parts = r.list()?;
    if parts.is_empty() {
        return Err(Error::format("message", "a group has no world"));
    }
    Ok(parts.into_iter().map(|part| part as u64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::{Collective, Place, ReduceOp, engine::FailureReason};
    use numcore::DType;

    #[test]
    fn messages_travel_and_cut_ones_are_errors() {
        let call = Fingerprint {
            what: Collective::AllReduce(ReduceOp::Avg),
            dtype: DType::BF16,
            in_place: true,
            header: false,
            parts: [3].into(),
            of: Some("bucket 1".into()),
            at: Place { file: "a.rs".into(), line: 1, column: 2 },
        };
        let group: GroupId = [0, 3, u64::MAX].into();
        let header =
            |key| Header { group: group.clone(), key, tag: 9, call: call.clone(), elements: 4, payload: vec![1, 2] };
        let failure = Failure { reason: FailureReason::Peer { peer: 1, cause: "x".into() }, calls: String::new() };
        let messages = [
            Message::Call(header(Key::All(7))),
            Message::Call(header(Key::Pair { from: 1, to: 0, number: 2 })),
            Message::Leave(group.clone()),
            Message::Fail(3, failure),
            Message::Goodbye,
            Message::Recover { made: 2, dead: vec![1, 4] },
        ];
        for message in messages {
            let bytes = message.to_bytes();
            assert_eq!(Message::from_bytes(&bytes).unwrap(), message);
            assert!((0..bytes.len()).all(|end| Message::from_bytes(&bytes[..end]).is_err()));
        }
        let mut bytes = Message::Call(Header { tag: u32::MAX, ..header(Key::All(7)) }).to_bytes();
        let at = bytes.windows(8).position(|word| word == u64::from(u32::MAX).to_le_bytes()).unwrap();
        bytes[at..at + 8].copy_from_slice(&((1u64 << 32) + 9).to_le_bytes());
        assert!(Message::from_bytes(&bytes).unwrap_err().to_string().contains("no tag is 4294967305"));
        assert!(Message::from_bytes(&Message::Leave([].into()).to_bytes()).is_err(), "a group is of a world");
    }
}
