//! Tests of connections, and of changed bytes on them.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use numcore::rng::Philox;

use super::{
    frame::LinkEnded,
    link::TcpLink,
    outbox::EAGER,
    secret::{ConnectionEnd, Secret},
    socket::read,
    table::{Hello, ProcessTable},
    transport::TcpTransport,
};
use crate::{Channel, Request, Test, Transport};

pub(super) const LONG: Duration = Duration::from_secs(60);

/// A stream that gives what was recorded, then waits for ever, and records what is written.
#[derive(Default)]
pub(super) struct Recorded {
    pub(super) input: VecDeque<u8>,
    pub(super) output: Vec<u8>,
    /// The most bytes that one call takes.
    most: usize,
    is_closed: bool,
}

impl Recorded {
    pub(super) fn of(input: &[u8], most: usize) -> Self {
        Recorded { input: input.to_vec().into(), most, ..Recorded::default() }
    }
}

impl Read for Recorded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.input.is_empty() {
            return if self.is_closed { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let most = bytes.len().min(self.most);
        self.input.read(&mut bytes[..most])
    }
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.most);
        self.output.extend(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn address(free: &TcpListener) -> SocketAddr {
    free.local_addr().expect("its address")
}

/// Two transports of one job, with a connection between them.
pub(super) fn pair(silence: Duration) -> [TcpTransport<TcpStream>; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(address(&listener)).unwrap();
    let accepted = listener.accept().unwrap().0;
    [&dialed, &accepted].iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    [TcpTransport::new(0, vec![None, Some(dialed)], silence), TcpTransport::new(1, vec![Some(accepted), None], silence)]
}

/// Lets both lend their memory to each other, if the system can do that.
pub(super) fn lend(left: &mut TcpTransport<TcpStream>, right: &mut TcpTransport<TcpStream>, beside: [&Request; 2]) {
    left.lend_to(1);
    right.lend_to(0);
    let begun = Instant::now();
    while cfg!(target_os = "linux") && !(left.lends_to(1) && right.lends_to(0)) {
        assert!(begun.elapsed() < LONG, "a process may not read its own memory");
        drop((left.test(beside[0]), right.test(beside[1])));
    }
}

pub(super) fn send(own: &mut impl Transport, bytes: &[u8], to: usize, tag: u32) -> Request {
    // SAFETY: the bytes of tests live until the transports are dropped, and do not change.
    unsafe { own.send(Channel::Data, bytes.as_ptr(), bytes.len(), to, tag) }.unwrap()
}

pub(super) fn receive(own: &mut impl Transport, bytes: &mut [u8], from: usize, tag: u32) -> Request {
    // SAFETY: tests read the bytes only once the request has ended.
    unsafe { own.receive(Channel::Data, bytes.as_mut_ptr(), bytes.len(), from, tag) }.unwrap()
}

fn ends(own: &mut impl Transport, other: &mut impl Transport, beside: &Request, request: &Request) -> Test {
    let begun = Instant::now();
    loop {
        match own.test(request) {
            Test::Pending => assert!(begun.elapsed() < LONG, "never ended"),
            ended => return ended,
        }
        // The other makes progress too.
        assert_eq!(other.test(beside), Test::Pending);
    }
}

#[test]
fn messages_of_all_lengths_match_receives_of_their_tag_in_order() {
    let mut random = Philox::new(3, 0);
    for round in 0..80 {
        let [mut left, mut right] = pair(LONG);
        // A receive without a message keeps each side making progress.
        let (mut none, mut nothing) = ([0; 1], [0; 1]);
        let (beside_left, beside_right) =
            (receive(&mut left, &mut none, 1, 9999), receive(&mut right, &mut nothing, 0, 9999));
        if round % 4 > 1 {
            lend(&mut left, &mut right, [&beside_left, &beside_right]);
        }
        // The system forbids the reading before the first message, or while messages are under way.
        let is_forbidden = round % 8 > 5;
        if round % 16 > 13 {
            right.forbid(0);
        }
        let mut length = || [0, 1, 100, EAGER, EAGER + 1, 200_000, 3 << 20][random.below(7) as usize];
        let sent: Vec<(u32, Vec<u8>)> = (0..12).map(|k| (k % 3, vec![k as u8 + 1; length()])).collect();
        let mut room: Vec<(u32, Vec<u8>)> = sent.iter().map(|(tag, bytes)| (*tag, vec![0; bytes.len()])).collect();
        // Receives of other tags come in another order, before the sends and after them.
        let order: Vec<usize> = [1, 2, 0].iter().flat_map(|tag| (0..12).filter(move |k| k % 3 == *tag)).collect();
        let before = round % 13;
        let mut receives = Vec::new();
        for &k in &order[..before.min(12)] {
            let (tag, bytes) = &mut room[k];
            receives.push((k, receive(&mut right, bytes, 0, *tag)));
        }
        let sends: Vec<Request> = sent.iter().map(|(tag, bytes)| send(&mut left, bytes, 1, *tag)).collect();
        if round % 2 == 0 {
            (0..50).for_each(|_| drop((left.test(&beside_left), right.test(&beside_right))));
        }
        if is_forbidden {
            right.forbid(0);
        }
        for &k in &order[before.min(12)..] {
            let (tag, bytes) = &mut room[k];
            receives.push((k, receive(&mut right, bytes, 0, *tag)));
        }
        for (k, request) in &receives {
            assert_eq!(
                ends(&mut right, &mut left, &beside_left, request),
                Test::Done(sent[*k].1.len()),
                "round {round}"
            );
        }
        for request in &sends {
            assert_eq!(ends(&mut left, &mut right, &beside_right, request), Test::Done(0));
        }
        assert_eq!(room, sent, "round {round}");
        let has_long = sent.iter().any(|(_, bytes)| bytes.len() > EAGER);
        assert!(round % 16 < 14 || !has_long || !left.lends_to(1), "round {round}");
        part(left, right);
    }
}

#[test]
fn a_message_that_is_too_long_for_its_receive_is_an_error_on_both_sides() {
    // Short and long ones, that come before the receive and after it.
    for (sent, room) in [(EAGER + 1, EAGER), (EAGER + 1, 0), (100, 99), (3 << 20, 100)] {
        for (is_before, is_lent) in [(false, false), (false, true), (true, false), (true, true)] {
            let [mut left, mut right] = pair(LONG);
            let (mut none, mut nothing) = ([0; 1], [0; 1]);
            let (beside_left, beside_right) =
                (receive(&mut left, &mut none, 1, 9999), receive(&mut right, &mut nothing, 0, 9999));
            if is_lent {
                lend(&mut left, &mut right, [&beside_left, &beside_right]);
            }
            let (message, next, mut place, mut rest) = (vec![7; sent], vec![8; 40_000], vec![0; room], vec![0; 40_000]);
            let early = is_before.then(|| receive(&mut right, &mut place, 0, 5));
            let sends = [send(&mut left, &message, 1, 5), send(&mut left, &next, 1, 5)];
            if !is_before {
                (0..50).for_each(|_| drop((left.test(&beside_left), right.test(&beside_right))));
            }
            let request = early.unwrap_or_else(|| receive(&mut right, &mut place, 0, 5));
            let Test::Failed(why) = ends(&mut right, &mut left, &beside_left, &request) else { panic!("{sent}") };
            assert!(why.contains(&format!("{sent} bytes came where {room} were due")), "{why}");
            match ends(&mut left, &mut right, &beside_right, &sends[0]) {
                Test::Failed(why) => assert!(why.contains("were due") && sent > EAGER, "{why}"),
                // It was sent before its receive was known.
                ended => assert!(ended == Test::Done(0) && sent <= EAGER, "{sent} {room} {ended:?}"),
            }
            // The next message of the tag has its own receive.
            let request = receive(&mut right, &mut rest, 0, 5);
            assert_eq!(ends(&mut right, &mut left, &beside_left, &request), Test::Done(40_000));
            assert_eq!((ends(&mut left, &mut right, &beside_right, &sends[1]), rest), (Test::Done(0), next));
            part(left, right);
        }
    }
}

/// Lets two processes leave at once, as in a job.
fn part(mut left: TcpTransport<TcpStream>, mut right: TcpTransport<TcpStream>) {
    left.say_goodbye();
    right.say_goodbye();
    let begun = Instant::now();
    while !left.has_parted() | !right.has_parted() {
        assert!(begun.elapsed() < LONG, "nobody listens");
    }
}

/// The first of two processes, and the bare connection of the other.
fn half(silence: Duration) -> (TcpTransport<TcpStream>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpStream::connect(address(&listener)).unwrap();
    let own = listener.accept().unwrap().0;
    own.set_nonblocking(true).unwrap();
    (TcpTransport::new(0, vec![None, Some(own)], silence), other)
}

/// The end of a receive of the control channel; one of data has no end before it.
fn end_of(own: &mut impl Transport) -> Test {
    let (mut packet, mut data) = ([0; 8], [0; 8]);
    let data = receive(own, &mut data, 1, 1);
    // SAFETY: the bytes are not used before the request has ended.
    let control = unsafe { own.receive(Channel::Control, packet.as_mut_ptr(), 8, 1, 0) }.unwrap();
    let begun = Instant::now();
    let end = loop {
        assert_eq!(own.test(&data), Test::Pending);
        match own.test(&control) {
            Test::Pending => assert!(begun.elapsed() < LONG, "never ended"),
            ended => break ended,
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(own.test(&data), end);
    end
}

#[test]
fn a_connection_that_ends_is_one_of_a_dead_process() {
    let (mut own, other) = half(LONG);
    drop(other);
    assert_eq!(end_of(&mut own), Test::Dead);
    let request = send(&mut own, &[1; 100], 1, 2);
    assert_eq!(own.test(&request), Test::Dead, "and takes nothing more");
}

#[test]
fn a_silent_process_is_found() {
    let (mut own, _other) = half(Duration::from_millis(300));
    let Test::Failed(why) = end_of(&mut own) else { panic!("it failed otherwise") };
    assert!(why.contains("nothing came for 300ms"), "{why}");
}

#[test]
fn something_else_than_a_message_ends_the_connection() {
    let words = [0, 1, 1].map(|number| [9, 0xf7, 0, 0, number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).concat();
    for (bytes, says) in [
        (&b"HTTP/1.1 400 Bad Request"[..], "where a message should begin"),
        (&[16, 0xf7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "of kind 16"),
        (&[12, 0xf7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "though this process cannot read its memory"),
        (&[14, 0xf7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "that nobody lends"),
        (&[9, 0xf7, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "a word 6 as a lender, behind 0 others"),
        (&words, "a word 1 as a lender, behind 2 others"),
        (&[13, 0xf7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "that nobody lends"),
        (&[1, 0xf7, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], "of kind 1 and 72057594037927936 bytes"),
        (&[1, 0xf7, 0, 0, 3, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0], "that no call of this process receives"),
    ] {
        let (mut own, mut other) = half(LONG);
        other.write_all(bytes).unwrap();
        let Test::Failed(why) = end_of(&mut own) else { panic!("it failed otherwise") };
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn processes_hear_of_one_whose_turns_at_another_take_long() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connection = || {
        let other = TcpStream::connect(address(&listener)).unwrap();
        let own = listener.accept().unwrap().0;
        [&other, &own].iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        (Some(own), other)
    };
    let ((first, _busy), (second, mut other)) = (connection(), connection());
    let mut own = TcpTransport::new(0, vec![None, first, second], Duration::from_secs(8));
    let mut place = [0; 8];
    let request = receive(&mut own, &mut place, 1, 5);
    let begun = Instant::now();
    while other.read(&mut [0; 16]).is_err() {
        assert!(begun.elapsed() < LONG, "the other was forgotten");
        own.test(&request);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_message_that_is_too_long_is_an_error_and_later_ones_arrive() {
    let [mut left, mut right] = pair(LONG);
    let (long, short) = (vec![1; 3 * EAGER], vec![2; 100]);
    let (mut none, mut room, mut last) = ([0; 1], vec![0; 2 * EAGER], vec![0; 100]);
    let beside = receive(&mut left, &mut none, 1, 9);
    let (first, second) = (receive(&mut right, &mut room, 0, 1), receive(&mut right, &mut last, 0, 2));
    send(&mut left, &long, 1, 1);
    send(&mut left, &short, 1, 2);
    let Test::Failed(why) = ends(&mut right, &mut left, &beside, &first) else { panic!("it does not fit") };
    assert!(why.contains("Processes::message_limit"), "{why}");
    assert_eq!(ends(&mut right, &mut left, &beside, &second), Test::Done(100));
    assert!(last == short && room.iter().all(|byte| *byte == 0));
    // A withdrawn receive ends, and its tag can be received again.
    let withdrawn = receive(&mut right, &mut room, 0, 3);
    right.cancel(&withdrawn);
    assert_eq!(right.test(&withdrawn), Test::Done(0));
    part(left, right);
}

#[test]
fn a_receive_that_begins_while_its_message_arrives_gets_it() {
    let (message, mut done) = (vec![3; EAGER], Vec::new());
    let mut writer = TcpLink::new(Recorded::of(&[], usize::MAX));
    // SAFETY: the message outlives the link.
    unsafe { writer.send(Channel::Data, message.as_ptr(), EAGER, 4, 0, &mut done) };
    let bytes = std::mem::take(&mut writer.stream().output);
    for (cut, room) in [(16, EAGER), (20, 2 * EAGER), (EAGER, EAGER)] {
        done.clear();
        let (mut link, mut received) = (TcpLink::new(Recorded::of(&bytes[..cut], usize::MAX)), vec![0; room]);
        link.turn(LONG, &mut done);
        // SAFETY: the memory outlives the link.
        unsafe { link.receive(Channel::Data, received.as_mut_ptr(), room, 4, 7, &mut done) };
        link.stream().input.extend(&bytes[cut..]);
        link.turn(LONG, &mut done);
        assert_eq!(done, [(7, Ok(EAGER))]);
        assert_eq!(received[..EAGER], message);
    }
}

/// Changes some bytes, cuts, or repeats a part.
fn changed(bytes: &[u8], random: &mut Philox) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + random.below(4) {
        let mut at = |bytes: &Vec<u8>| random.below(bytes.len().max(1) as u64) as usize;
        let (first, second) = (at(&bytes), at(&bytes));
        match (random.below(6), bytes.get_mut(first)) {
            (0, _) => bytes.truncate(first),
            (1, _) => bytes.extend_from_within(first.min(second)..first.max(second)),
            (2, Some(byte)) => *byte = u8::MAX,
            (3, Some(byte)) => *byte = byte.wrapping_add(1),
            (_, Some(byte)) => *byte ^= 1 << random.below(8),
            (_, None) => {}
        }
    }
    bytes
}

/// A stream that records the bytes of the other end.
struct Heard(TcpStream, Vec<u8>);

impl Read for Heard {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(bytes)?;
        self.1.extend(&bytes[..count]);
        Ok(count)
    }
}

impl Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn changed_bytes_of_a_handshake_prove_nothing() {
    let (secret, nonces) = (Secret::new(b"0123456789abcdef").unwrap(), [[1; 32], [2; 32]]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut dialer = Heard(TcpStream::connect(address(&listener)).unwrap(), Vec::new());
    let mut accepted = Heard(listener.accept().unwrap().0, Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| secret.prove_with(&mut dialer, ConnectionEnd::Dialer, "a job", nonces[0]).unwrap());
        let job = secret.prove_with(&mut accepted, ConnectionEnd::Listener, "its job", nonces[1]).unwrap();
        assert_eq!(job, "a job");
    });
    let ends = [
        (ConnectionEnd::Dialer, "a job", nonces[0], dialer.1),
        (ConnectionEnd::Listener, "its job", nonces[1], accepted.1),
    ];
    let hello = Hello { size: 3, rank: Some(2), listens: ([127, 0, 0, 1], 9).into() };
    let table = ProcessTable { rank: 1, meeting: [7, 8], addresses: vec![hello.listens; 3] };
    assert_eq!(Hello::from_bytes(&hello.to_bytes()).unwrap(), hello);
    assert_eq!(ProcessTable::from_bytes(&table.to_bytes(), 3).unwrap(), table);
    let mut random = Philox::new(5, 0);
    for _ in 0..1000 {
        for (end, job, nonce, heard) in &ends {
            let other = changed(heard, &mut random);
            let proven = secret.prove_with(&mut Recorded::of(&other, 7), *end, job, *nonce).is_ok();
            assert_eq!(proven, other.starts_with(heard));
        }
        let _ = Hello::from_bytes(&changed(&hello.to_bytes(), &mut random));
        let table = ProcessTable::from_bytes(&changed(&table.to_bytes(), &mut random), 3);
        assert!(table.map_or(true, |table| table.rank < 3 && table.addresses.len() == 3));
        let message = [&5u32.to_le_bytes()[..], b"hello"].concat();
        let _ = read(&mut Recorded::of(&changed(&message, &mut random), 3));
    }
    // A proof fits neither another connection, nor another job, nor the other direction.
    for (end, job, nonce, heard) in &ends {
        assert!(secret.prove(&mut Recorded::of(heard, 99), *end, job).is_err());
        assert!(secret.prove_with(&mut Recorded::of(heard, 99), *end, "another", *nonce).is_err());
        let other = if *end == ConnectionEnd::Dialer { ConnectionEnd::Listener } else { ConnectionEnd::Dialer };
        assert!(secret.prove_with(&mut Recorded::of(heard, 99), other, job, *nonce).is_err());
    }
}

#[test]
fn changed_bytes_of_messages_are_errors_and_write_nowhere_else() {
    let (lengths, mut done) = ([5, 0, 300, EAGER, EAGER + 3, 2 * EAGER], Vec::new());
    let payloads: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![7; length]).collect();
    // All receives are announced to this end: what it writes is a whole conversation.
    let mut other = TcpLink::new(Recorded::of(&[], usize::MAX));
    let mut rooms = payloads.clone();
    for (tag, room) in (0..).zip(&mut rooms) {
        // SAFETY: the room outlives the link.
        unsafe { other.receive(Channel::Data, room.as_mut_ptr(), room.len(), tag, tag as usize, &mut done) };
    }
    let mut writer = TcpLink::new(Recorded::of(&other.stream().output, usize::MAX));
    for (tag, payload) in (0..).zip(&payloads) {
        // SAFETY: the payload outlives the link.
        unsafe { writer.send(Channel::Data, payload.as_ptr(), payload.len(), tag, tag as usize, &mut done) };
    }
    writer.turn(LONG, &mut done);
    writer.leave(&mut done);
    let conversation = std::mem::take(&mut writer.stream().output);
    assert!(conversation.len() > lengths.iter().sum());
    let mut random = Philox::new(6, 0);
    for round in 0..8000 {
        let bytes = if round == 0 { conversation.clone() } else { changed_heads(&conversation, &lengths, &mut random) };
        let most = [usize::MAX, 4096, 1000][round % 3];
        let mut rooms: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![0; length + 8]).collect();
        let mut link = TcpLink::new(Recorded { is_closed: true, ..Recorded::of(&bytes, most) });
        done.clear();
        for (tag, room) in (0..).zip(&mut rooms) {
            // SAFETY: the room outlives the link.
            unsafe { link.receive(Channel::Data, room.as_mut_ptr(), room.len() - 8, tag, tag as usize, &mut done) };
        }
        // One whose messages of the control channel nobody receives is not read to its end.
        (0..1000).for_each(|_| link.turn(LONG, &mut done));
        assert!(rooms.iter().all(|room| room[room.len() - 8..] == [0; 8]), "round {round}");
        if round == 0 {
            assert!(done.len() == lengths.len() && done.iter().all(|(k, end)| *end == Ok(lengths[*k])), "{done:?}");
            assert_eq!(link.ended, Some(LinkEnded::Left));
        }
    }
}

/// Changes bytes near the headers of messages, which come one after another.
fn changed_heads(bytes: &[u8], lengths: &[usize], random: &mut Philox) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + random.below(3) {
        let message = random.below(lengths.len() as u64 + 1) as usize;
        let start: usize = lengths[..message].iter().map(|length| 16 + length).sum();
        let end = (start + 16).min(bytes.len());
        if start < end {
            let head = changed(&bytes[start..end], random);
            bytes.splice(start..end, head);
        }
    }
    bytes
}
