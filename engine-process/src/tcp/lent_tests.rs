//! Tests of memory that processes of one host lend to each other.

use std::time::{Duration, Instant};

use super::{
    frame::{LinkEnded, Outcome},
    link::TcpLink,
    tests::{LONG, Recorded, lend, pair, receive, send},
};
use crate::{Channel, Test, Transport};

#[test]
fn memory_of_a_process_that_has_left_is_no_message() {
    for lender_ends in [false, true] {
        let [mut left, mut right] = pair(Duration::from_millis(200));
        let (mut none, mut nothing, sent, mut place) = ([0; 1], [0; 1], vec![7; 1 << 20], vec![0; 1 << 20]);
        let (beside_left, beside_right) =
            (receive(&mut left, &mut none, 1, 9999), receive(&mut right, &mut nothing, 0, 9999));
        lend(&mut left, &mut right, [&beside_left, &beside_right]);
        let request = receive(&mut right, &mut place, 0, 5);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(50) {
            left.test(&beside_left);
        }
        send(&mut left, &sent, 1, 5);
        left.test(&beside_left);
        let left = if lender_ends {
            drop(left);
            None
        } else {
            Some(left)
        };
        let begun = Instant::now();
        let mut test = Test::Pending;
        while begun.elapsed() < Duration::from_millis(100) && test == Test::Pending {
            test = right.test(&request);
        }
        let due = if lender_ends { Test::Pending } else { Test::Done(1 << 20) };
        assert!(test == due && (lender_ends || place == sent), "{test:?}");
        drop((left, right));
    }
}

/// The ends of a connection that lend to each other, for bytes that a test carries.
fn lending() -> [TcpLink<Recorded>; 2] {
    let [mut lender, mut reader] = [(), ()].map(|()| TcpLink::new(Recorded::of(&[], usize::MAX)));
    lender.lend();
    lender.turn(LONG, &mut Vec::new());
    // The words, and their answer.
    carry(&mut lender, &mut reader, &mut Vec::new());
    carry(&mut reader, &mut lender, &mut Vec::new());
    assert!(lender.lends() && reader.reads());
    [lender, reader]
}

/// Carries what was written, and gives the other end a turn.
fn carry(from: &mut TcpLink<Recorded>, to: &mut TcpLink<Recorded>, done: &mut Vec<Outcome>) {
    to.stream().input.extend(std::mem::take(&mut from.stream().output));
    to.turn(LONG, done);
}

#[test]
fn a_long_copy_lets_other_connections_have_their_turn() {
    let half = 64 << 20;
    for is_withdrawn in [false, true] {
        let (sent, mut place, mut done) = (vec![7; half + 1], vec![0; half + 1], Vec::new());
        let [mut lender, mut reader] = lending();
        // SAFETY: the message and its place outlive the links.
        unsafe {
            lender.send(Channel::Data, sent.as_ptr(), sent.len(), 4, 0, &mut done);
            reader.receive(Channel::Data, place.as_mut_ptr(), place.len(), 4, 1, &mut done);
        }
        carry(&mut lender, &mut reader, &mut done);
        assert_eq!(done, [], "it was copied in one turn");
        if is_withdrawn {
            reader.cancel(1);
        }
        reader.turn(LONG, &mut done);
        carry(&mut reader, &mut lender, &mut done);
        let due = [(1, Ok(sent.len())), (0, Ok(0))];
        assert_eq!(done, due[usize::from(is_withdrawn)..]);
        assert!(place[..half] == sent[..half] && (place[half] == 7) != is_withdrawn);
    }
}

#[test]
fn the_reason_that_memory_cannot_be_read_is_in_the_error_of_the_connection() {
    // The words of a process that is not there, which lends all the same.
    let frame = |kind, tag, length: u64| [&[kind, 0xf7, 0, 0, tag, 0, 0, 0][..], &length.to_le_bytes()].concat();
    let words: Vec<Vec<u8>> = (0..6).map(|k| frame(9, k, i32::MAX as u64)).collect();
    let (mut done, why) = (Vec::new(), "No such process (os error 3)");
    let mut reader = TcpLink::new(Recorded::of(&[words.concat(), frame(12, 1, 40_000)].concat(), usize::MAX));
    reader.turn(LONG, &mut done);
    let says = |reader: &TcpLink<Recorded>, what: &str| {
        assert!(matches!(&reader.ended, Some(LinkEnded::Broken(words)) if words.contains(what) && words.contains(why)));
    };
    says(&reader, "cannot read its memory");
    // One that could be read, and breaks the rules later.
    let (sent, mut place) = (vec![7; 100_000], vec![0; 100_000]);
    let [mut lender, mut reader] = lending();
    reader.forbid();
    // SAFETY: the message and its place outlive the links.
    unsafe {
        lender.send(Channel::Data, sent.as_ptr(), sent.len(), 4, 0, &mut done);
        reader.receive(Channel::Data, place.as_mut_ptr(), place.len(), 4, 1, &mut done);
    }
    carry(&mut lender, &mut reader, &mut done);
    reader.stream().input.extend([0; 16]);
    reader.turn(LONG, &mut done);
    says(&reader, "its memory could not be copied");
}

#[test]
fn a_message_that_was_asked_for_comes_to_its_receive_or_nowhere() {
    for is_withdrawn in [false, true] {
        let (sent, mut place, mut done) = (vec![7; 100_000], vec![0; 100_000], Vec::new());
        let ([mut lender, mut reader], mut later) = (lending(), place.clone());
        reader.forbid();
        // SAFETY: the message and its place outlive the links.
        unsafe {
            lender.send(Channel::Data, sent.as_ptr(), sent.len(), 4, 0, &mut done);
            reader.receive(Channel::Data, place.as_mut_ptr(), place.len(), 4, 1, &mut done);
            reader.receive(Channel::Data, later.as_mut_ptr(), later.len(), 5, 3, &mut done);
        }
        carry(&mut lender, &mut reader, &mut done);
        assert_eq!(done, []);
        // The part that lies before the token is copied first.
        place.fill(0);
        if is_withdrawn {
            reader.cancel(1);
        }
        carry(&mut reader, &mut lender, &mut done);
        carry(&mut lender, &mut reader, &mut done);
        let due = [(0, Ok(0)), (1, Ok(sent.len()))];
        assert_eq!(done, due[..2 - usize::from(is_withdrawn)]);
        assert!(place == if is_withdrawn { vec![0; 100_000] } else { sent.clone() });
        // A receive that had begun before is announced since.
        done.clear();
        // SAFETY: the message outlives the link.
        unsafe { lender.send(Channel::Data, sent.as_ptr(), sent.len(), 5, 2, &mut done) };
        carry(&mut lender, &mut reader, &mut done);
        assert!(done == [(2, Ok(0)), (3, Ok(sent.len()))] && later == sent);
    }
}
