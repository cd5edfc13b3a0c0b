//! A collective call as data.

use std::{fmt, panic::Location, sync::Arc};

use numcore::{DType, Error, Result, Runtime, Tensor, TensorMut};

use super::Place;

/// How the ranks' values are combined. The order of additions is that of the ranks; halves are combined in `f32`.
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

/// What is exchanged. `n` is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the combination of all outputs, in place.
    AllReduce(ReduceOp),
    /// Rank `root` gets it, in place; the memory of the others is arbitrary afterwards.
    Reduce {
        /// How values are combined.
        op: ReduceOp,
        /// Who gets the result.
        root: usize,
    },
    /// Every rank gets its part of the combination. Without an input it is combined in place, and the other parts are arbitrary
    /// afterwards.
    ReduceScatter(ReduceOp),
    /// Every rank gets all parts. Without an input its own part is in the output already.
    AllGather,
    /// Every rank gets what rank `root` has, in place.
    Broadcast {
        /// Whose value it is.
        root: usize,
    },
    /// Part `j` of rank `i`'s input becomes part `i` of rank `j`'s output.
    AllToAll,
    /// Nothing but the meeting.
    Barrier,
    /// The input goes to a rank.
    Send {
        /// Which rank.
        to: usize,
    },
    /// The output is filled by a rank.
    Recv {
        /// Which rank.
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

    /// The rank that has, or gets, the value.
    pub fn root(&self) -> Option<usize> {
        match *self {
            Collective::Reduce { root, .. } | Collective::Broadcast { root } => Some(root),
            _ => None,
        }
    }

    /// How values are combined, if they are.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match *self {
            Collective::AllReduce(op) | Collective::ReduceScatter(op) | Collective::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }
}

/// One rank's part of a collective: rows of memory, and the place in the program that asked for it. Made by
/// [`Collectives`](super::Collectives), which checks that everything fits.
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
}

/// What a call's memory would say, of one that has none.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallHeader {
    in_place: bool,
}

impl<R: Runtime> Call<R> {
    /// What is exchanged.
    pub fn what(&self) -> Collective {
        self.what
    }

    /// The element type of all memory in it.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What is only read: one row.
    pub fn input(&self) -> Option<&Tensor<R>> {
        self.input.as_ref()
    }

    /// What it is of, where calls for several things come from one place.
    pub fn of(&self) -> Option<&Arc<str>> {
        self.of.as_ref()
    }

    /// Elements of the parts this rank contributes: one for each rank in [`Collective::ReduceScatter`] and
    /// [`Collective::AllToAll`], otherwise one in all.
    pub fn send_parts(&self) -> &[usize] {
        &self.send
    }

    /// Elements of the parts this rank gets: one for each rank in [`Collective::AllGather`] and [`Collective::AllToAll`], otherwise
    /// one in all.
    pub fn recv_parts(&self) -> &[usize] {
        &self.recv
    }

    /// This call without its memory, for a communicator that moves nothing for it: the same ranks meet there, compare the same fingerprint, and
    /// get its error where they disagree, fail or stay away. An engine that cannot compare calls by itself starts it on one that can.
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
        }
    }

    /// Whether this is a [`header`](Call::header): ranks meet and compare, and nothing is moved.
    pub fn is_header(&self) -> bool {
        self.header.is_some()
    }

    fn is_in_place(&self) -> bool {
        self.header.map_or(self.input.is_none(), |header| header.in_place)
    }

    /// The memory, for an engine that has checked and noted the rest: what is read, and what is filled.
    pub fn into_memory(self) -> (Option<Tensor<R>>, Option<TensorMut<R>>) {
        (self.input, self.output)
    }

    /// What must agree on all ranks.
    pub fn fingerprint(&self) -> Fingerprint {
        let parts = match self.what {
            // Every pair of ranks has a length of its own there; engines check them one by one.
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

/// What ranks compare before anything is exchanged.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// What is exchanged, with root and reduction.
    pub what: Collective,
    /// The element type.
    pub dtype: DType,
    /// Whether there is no input: a rank's own part is in its output, where one with an input has nothing yet.
    pub in_place: bool,
    /// Whether it is a [`header`](Call::header), with which nothing is moved.
    pub header: bool,
    /// Elements, by rank where ranks have parts.
    pub parts: Arc<[usize]>,
    /// What the call is of, where calls for several things come from one place.
    pub of: Option<Arc<str>>,
    /// The caller's place.
    pub at: Place,
}

impl Fingerprint {
    /// Whether the two are calls that can meet: the same collective of the same thing, type and lengths, both in place or neither, from
    /// places that `places` allows.
    pub fn agrees(&self, other: &Fingerprint, places: Places) -> bool {
        let (a, b) = (self, other);
        (a.what, a.dtype, a.in_place, a.header) == (b.what, b.dtype, b.in_place, b.header)
            && (&a.parts, &a.of) == (&b.parts, &b.of)
            && (places == Places::Any || a.at == b.at)
    }

    /// The call with roots and peers by their ranks in the world, as messages give them.
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

/// From where in the program calls that meet may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// From one place: ranks that diverged are found at once.
    Same,
    /// From anywhere.
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

/// An error unless `op` can combine values of this type.
pub(super) fn check_reduction(name: &'static str, op: ReduceOp, dtype: DType) -> Result<()> {
    if op == ReduceOp::Avg && !dtype.is_float() {
        return Err(Error::dtype(name, &[dtype], "only floating types have an average here; use `Sum`"));
    }
    Ok(())
}
