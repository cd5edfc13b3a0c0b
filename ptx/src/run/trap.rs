//! What ends a launch, before it is put in words.

use crate::error::FaultKind;

/// A finding, and the lane that it concerns.
#[derive(Debug)]
pub(super) struct Trap {
    pub lane: u32,
    pub kind: FaultKind,
}

/// A result of an instruction. A finding is rare, hence the box.
pub(super) type Trapped<T> = Result<T, Box<Trap>>;

/// The error of a lane.
pub(super) fn trap<T>(lane: usize, kind: FaultKind) -> Trapped<T> {
    Err(Box::new(Trap { lane: lane as u32, kind }))
}

/// A finding with its place in the code and its thread in the block.
#[derive(Debug)]
pub(super) struct Located {
    pub instruction: u32,
    pub thread: u32,
    pub kind: FaultKind,
}

/// The lanes of a mask, in order.
pub(super) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}
