//! A collective call as data.

use std::{fmt, panic::Location, sync::Arc, time::Duration};

use numcore::{DType, Error, Result, Runtime, Tensor, TensorMut};

use super::Place;

/// The reduction of the ranks' values. Additions are in rank order; halves are combined in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// `Σ` (`bool`: or).
    Sum,
    /// `Σ / n`; floating types only.
    Avg,
    /// `Π` (`bool`: and).
    Prod,
    /// Smallest; NaN wins.
    Min,
    /// Largest; NaN wins.
    Max,
}

/// The kind of a collective. `n` is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of all outputs, in place.
    AllReduce(ReduceOp),
    /// Rank `root` gets the reduction of all outputs, in place; the memory of the others is arbitrary afterwards.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// Every rank gets its part of the reduction. Without an input it is computed in place, and the other parts are
    /// arbitrary afterwards.
    ReduceScatter(ReduceOp),
    /// Every rank gets all parts. Without an input its own part is in the output already.
    AllGather,
    /// Every rank gets the value of rank `root`, in place.
    Broadcast {
        /// The rank whose value is sent.
        root: usize,
    },
    /// Part `j` of rank `i`'s input becomes part `i` of rank `j`'s output.
    AllToAll,
    /// A synchronization of ranks without data.
    Barrier,
    /// The input goes to a rank.
    Send {
        /// The destination rank.
        to: usize,
    },
    /// The output is filled by a rank.
    Recv {
        /// The source rank.
        from: usize,
    },
}

impl Collective {
    /// The name of the collective in messages and counts.
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce(_) => "all_reduce",
            Collective::Reduce { .. } => "reduce",
            Collective::ReduceScatter(_) => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast { .. } => "broadcast",
            Collective::AllToAll => "all_to_all",
            Collective::Barrier => "barrier",
            Collective::Send { .. } => "send",
            Collective::Recv { .. } => "recv",
        }
    }

    /// The other rank of a transfer between two.
    pub fn peer(&self) -> Option<usize> {
        match *self {
            Collective::Send { to: peer } | Collective::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// The rank that sends the value of a broadcast, or gets the value of a reduce.
    pub fn root(&self) -> Option<usize> {
        match *self {
            Collective::Reduce { root, .. } | Collective::Broadcast { root } => Some(root),
            _ => None,
        }
    }

    /// The reduction, if the collective has one.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match *self {
            Collective::AllReduce(op) | Collective::ReduceScatter(op) | Collective::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }
}

/// One rank's part of a collective: rows of memory, and the place in the program that made the call. Made by
/// [`Collectives`](super::Collectives), which checks that shapes, types and ranks fit.
pub struct Call<R: Runtime> {
    pub(super) what: Collective,
    pub(super) dtype: DType,
    pub(super) input: Option<Tensor<R>>,
    pub(super) output: Option<TensorMut<R>>,
    pub(super) send: Arc<[usize]>,
    pub(super) recv: Arc<[usize]>,
    pub(super) of: Option<Arc<str>>,
    pub(super) at: &'static Location<'static>,
    pub(super) header: Option<CallHeader>,
    pub(super) timeout: Option<Duration>,
}

/// The property of a call's memory that a header, which has no memory, keeps for its fingerprint.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallHeader {
    in_place: bool,
}

impl<R: Runtime> Call<R> {
    /// The kind of collective.
    pub fn what(&self) -> Collective {
        self.what
    }

    /// The element type of all memory in it.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The input, which is only read: one row.
    pub fn input(&self) -> Option<&Tensor<R>> {
        self.input.as_ref()
    }

    /// The name of the object that the call belongs to, where calls for several objects come from one place.
    pub fn of(&self) -> Option<&Arc<str>> {
        self.of.as_ref()
    }

    /// The source line of the call.
    pub fn at(&self) -> &'static Location<'static> {
        self.at
    }

    /// The time that the call may take, if it has one of its own.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Elements of the parts this rank contributes: one for each rank in [`Collective::ReduceScatter`] and
    /// [`Collective::AllToAll`], otherwise one in all.
    pub fn send_parts(&self) -> &[usize] {
        &self.send
    }

    /// Elements of the parts this rank gets: one for each rank in [`Collective::AllGather`] and
    /// [`Collective::AllToAll`], otherwise one in all.
    pub fn recv_parts(&self) -> &[usize] {
        &self.recv
    }

    /// Makes this call without its memory, for a communicator that moves no data for it. Its ranks compare the call's
    /// fingerprint there, and get an error if they disagree, fail or stay away. An engine that cannot compare calls by
    /// itself starts the header on a communicator that can.
    pub fn header<H: Runtime>(&self) -> Call<H> {
        Call {
            what: self.what,
            dtype: self.dtype,
            input: None,
            output: None,
            send: self.send.clone(),
            recv: self.recv.clone(),
            of: self.of.clone(),
            at: self.at,
            header: Some(CallHeader { in_place: self.is_in_place() }),
            timeout: self.timeout,
        }
    }

    /// Tells whether this is a [`header`](Call::header): ranks synchronize and compare, and no data is moved.
    pub fn is_header(&self) -> bool {
        self.header.is_some()
    }

    fn is_in_place(&self) -> bool {
        self.header.map_or(self.input.is_none(), |header| header.in_place)
    }

    /// Returns the memory, for an engine that has checked and noted the rest: the input, and the output to fill.
    pub fn into_memory(self) -> (Option<Tensor<R>>, Option<TensorMut<R>>) {
        (self.input, self.output)
    }

    /// The properties that must be equal on all ranks.
    pub fn fingerprint(&self) -> Fingerprint {
        let parts = match self.what {
            // Every pair of ranks has a length of its own in an all-to-all; engines check them one by one.
            Collective::AllToAll => Arc::new([]) as Arc<[usize]>,
            Collective::AllGather => self.recv.clone(),
            _ => self.send.clone(),
        };
        Fingerprint {
            what: self.what,
            dtype: self.dtype,
            in_place: self.is_in_place(),
            header: self.is_header(),
            parts,
            of: self.of.clone(),
            at: self.at.into(),
        }
    }
}

/// The properties of a call that ranks compare before data is exchanged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// The kind of collective, with root and reduction.
    pub what: Collective,
    /// The element type.
    pub dtype: DType,
    /// True if there is no input: a rank's own part is in its output, which a call with an input has yet to fill.
    pub in_place: bool,
    /// True if it is a [`header`](Call::header), with which no data is moved.
    pub header: bool,
    /// Elements, by rank where ranks have parts.
    pub parts: Arc<[usize]>,
    /// The name of the object that the call belongs to, where calls for several objects come from one place.
    pub of: Option<Arc<str>>,
    /// The caller's place.
    pub at: Place,
}

impl Fingerprint {
    /// Tells whether the two calls match: equal collective, name, type and lengths, both in place or neither, from
    /// places that `places` allows.
    pub fn agrees(&self, other: &Fingerprint, places: Places) -> bool {
        let (a, b) = (self, other);
        (a.what, a.dtype, a.in_place, a.header) == (b.what, b.dtype, b.in_place, b.header)
            && (&a.parts, &a.of) == (&b.parts, &b.of)
            && (places == Places::Any || a.at == b.at)
    }

    /// Translates the root or peer from a rank of the group to a world rank, for error texts. `members[r]` is the world
    /// rank of the group's rank `r`.
    pub fn in_world(&self, members: &[usize]) -> Fingerprint {
        let seat = |rank: usize| members.get(rank).copied().unwrap_or(rank);
        let what = match self.what {
            Collective::Reduce { op, root } => Collective::Reduce { op, root: seat(root) },
            Collective::Broadcast { root } => Collective::Broadcast { root: seat(root) },
            Collective::Send { to } => Collective::Send { to: seat(to) },
            Collective::Recv { from } => Collective::Recv { from: seat(from) },
            what => what,
        };
        Fingerprint { what, ..self.clone() }
    }
}

/// The source lines from which matching calls may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// One line: ranks that diverged are found at once.
    Same,
    /// Any lines.
    Any,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what.name())?;
        match self.what {
            Collective::AllReduce(op) | Collective::ReduceScatter(op) => write!(f, "({op:?})")?,
            Collective::Reduce { op, root } => write!(f, "({op:?}, root {root})")?,
            Collective::Broadcast { root } => write!(f, "(root {root})")?,
            Collective::Send { to } => write!(f, "(to {to})")?,
            Collective::Recv { from } => write!(f, "(from {from})")?,
            Collective::AllGather | Collective::AllToAll | Collective::Barrier => {}
        }
        if self.what != Collective::Barrier {
            write!(f, " {}{:?}", self.dtype, self.parts)?;
        }
        // The other collectives have one form.
        if self.in_place && matches!(self.what, Collective::ReduceScatter(_) | Collective::AllGather) {
            write!(f, " in place")?;
        }
        if let Some(of) = &self.of {
            write!(f, " of {of}")?;
        }
        write!(f, " at {}:{}", self.at.file, self.at.line)
    }
}

/// Checks that `op` can combine values of this type.
pub(super) fn check_reduction(name: &'static str, op: ReduceOp, dtype: DType) -> Result<()> {
    if op == ReduceOp::Avg && !dtype.is_float() {
        return Err(Error::dtype(name, &[dtype], "only floating types have an average here; use `Sum`"));
    }
    if dtype.is_storage() {
        return Err(Error::dtype(name, &[dtype], "it is stored, not computed in; cast it first, with `to_dtype`"));
    }
    Ok(())
}
