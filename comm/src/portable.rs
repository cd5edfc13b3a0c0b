//! Values that can be sent to another process: the return types of programs on many ranks.

use std::{collections::BTreeMap, time::Duration};

use numcore::{DType, Error, ErrorKind, Result, Scalar};

use super::{
    ReduceOp, Traffic,
    fingerprint::OPS,
    wire::{WireReader, Writer, malformed},
};

/// A value with a wire form.
pub trait Portable: Send + Sized {
    /// Writes the value's wire form.
    fn write(&self, to: &mut Writer);
    /// Reads a value that [`write`](Portable::write) wrote.
    fn read(from: &mut WireReader<'_>) -> Result<Self>;

    /// The wire form alone, as bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.write(&mut w);
        w.finish()
    }

    /// Reads a value from its wire form; bytes after its end are an error.
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut r = WireReader::new(bytes);
        let value = Self::read(&mut r)?;
        r.finish()?;
        Ok(value)
    }
}

macro_rules! numbers {
    ($($t:ty),*) => {$(
        impl Portable for $t {
            fn write(&self, to: &mut Writer) {
                to.bytes(&self.to_le_bytes());
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                from.bytes()?.try_into().map(<$t>::from_le_bytes).map_err(|_| malformed("a number"))
            }
        }
    )*};
}
numbers!(u8, u32, u64, usize, i32, i64, f32, f64);

impl Portable for () {
    fn write(&self, _: &mut Writer) {}
    fn read(_: &mut WireReader<'_>) -> Result<Self> {
        Ok(())
    }
}

impl Portable for bool {
    fn write(&self, to: &mut Writer) {
        to.u8((*self).into());
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        Ok(from.u8()? != 0)
    }
}

impl Portable for String {
    fn write(&self, to: &mut Writer) {
        to.text(self);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.text().map(str::to_string)
    }
}

/// Text that lives as long as the process that reads it: reading leaks it.
impl Portable for &'static str {
    fn write(&self, to: &mut Writer) {
        to.text(self);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.text().map(|text| &*text.to_string().leak())
    }
}

impl Portable for Duration {
    fn write(&self, to: &mut Writer) {
        to.u64(u64::try_from(self.as_nanos()).unwrap_or(u64::MAX));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.u64().map(Duration::from_nanos)
    }
}

impl Portable for DType {
    fn write(&self, to: &mut Writer) {
        to.u8(*self as u8);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let own = from.u8()?;
        DType::ALL.into_iter().find(|d| *d as u8 == own).ok_or_else(|| malformed("an element type"))
    }
}

impl Portable for ReduceOp {
    fn write(&self, to: &mut Writer) {
        to.u8(*self as u8);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let own = from.u8()?;
        OPS.into_iter().find(|op| *op as u8 == own).ok_or_else(|| malformed("a reduction"))
    }
}

impl Portable for Traffic {
    fn write(&self, to: &mut Writer) {
        self.exposed.write(to.u64(self.calls).u64(self.payload).u64(self.sent));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let (calls, payload, sent) = (from.u64()?, from.u64()?, from.u64()?);
        Ok(Traffic { calls, payload, sent, exposed: Duration::read(from)? })
    }
}

impl<T: Portable> Portable for Option<T> {
    fn write(&self, to: &mut Writer) {
        to.u8(self.is_some().into());
        if let Some(value) = self {
            value.write(to);
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        (from.u8()? != 0).then(|| T::read(from)).transpose()
    }
}

impl<T: Portable> Portable for Vec<T> {
    fn write(&self, to: &mut Writer) {
        to.usize(self.len());
        self.iter().for_each(|value| value.write(to));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let length = from.usize()?;
        (0..length).map(|_| T::read(from)).collect()
    }
}

impl<T: Portable, const N: usize> Portable for [T; N] {
    fn write(&self, to: &mut Writer) {
        self.iter().for_each(|value| value.write(to));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let values: Vec<T> = (0..N).map(|_| T::read(from)).collect::<Result<_>>()?;
        values.try_into().map_err(|_| malformed("an array"))
    }
}

impl<K: Portable + Ord, V: Portable> Portable for BTreeMap<K, V> {
    fn write(&self, to: &mut Writer) {
        to.usize(self.len());
        self.iter().for_each(|(key, value)| {
            key.write(to);
            value.write(to);
        });
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let length = from.usize()?;
        (0..length).map(|_| Ok((K::read(from)?, V::read(from)?))).collect()
    }
}

macro_rules! tuples {
    ($(($($t:ident $k:tt),*)),*) => {$(
        impl<$($t: Portable),*> Portable for ($($t,)*) {
            fn write(&self, to: &mut Writer) {
                $(self.$k.write(to);)*
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                Ok(($($t::read(from)?,)*))
            }
        }
    )*};
}
tuples!((A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3), (A 0, B 1, C 2, D 3, E 4));

impl<T: Portable> Portable for Result<T> {
    fn write(&self, to: &mut Writer) {
        to.u8(self.is_ok().into());
        match self {
            Ok(value) => value.write(to),
            Err(error) => error.write(to),
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        Ok(if from.u8()? != 0 { Ok(T::read(from)?) } else { Err(Error::read(from)?) })
    }
}

impl Portable for Scalar {
    fn write(&self, to: &mut Writer) {
        match *self {
            Scalar::F64(x) => x.write(to.u8(0)),
            Scalar::I64(x) => x.write(to.u8(1)),
            Scalar::U64(x) => x.write(to.u8(2)),
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        match from.u8()? {
            0 => f64::read(from).map(Scalar::F64),
            1 => i64::read(from).map(Scalar::I64),
            2 => u64::read(from).map(Scalar::U64),
            _ => Err(malformed("a scalar")),
        }
    }
}

/// The tag of a kind that has an operation and a reason, with both.
fn reason(kind: &ErrorKind) -> Option<(u8, &'static str, &str)> {
    Some(match kind {
        ErrorKind::Mismatch { op, why } => (1, *op, why),
        ErrorKind::Argument { op, why } => (3, *op, why),
        ErrorKind::Usage { op, why } => (8, *op, why),
        ErrorKind::Anomaly { op, why } => (9, *op, why),
        ErrorKind::Schedule { op, why } => (10, *op, why),
        ErrorKind::Internal { op, why } => (11, *op, why),
        ErrorKind::Unsupported { op, device: None, why } => (12, *op, why),
        _ => return None,
    })
}

/// Reads the error of a kind that has an operation and a reason.
fn of_reason(tag: u8, from: &mut WireReader<'_>) -> Result<Error> {
    let of: fn(&'static str, String) -> Error = match tag {
        1 => Error::mismatch,
        3 => Error::argument,
        8 => Error::usage,
        9 => Error::anomaly,
        10 => Error::schedule,
        11 => Error::internal,
        12 => Error::unsupported,
        _ => return Err(malformed("an error")),
    };
    Ok(of(Portable::read(from)?, Portable::read(from)?))
}

/// Kinds of numbers and text keep their kind, and the module's path. `Shape`, `DType`, `Index`, `Io` and all kinds of
/// memory, devices and the tape become `Argument`, with their message.
impl Portable for Error {
    fn write(&self, to: &mut Writer) {
        match self.kind() {
            ErrorKind::Peer { op, peer, cause } => to.u8(0).text(op).usize(*peer).text(cause),
            ErrorKind::Timeout { op, waited, missing, called, calls } => {
                waited.write(to.u8(2).text(op));
                called.write(to.list(missing));
                to.text(calls)
            }
            ErrorKind::MissingGradient { names } => {
                names.write(to.u8(5));
                &mut *to
            }
            ErrorKind::Range { op, name, value, allowed } => {
                value.write(to.u8(6).text(op).text(name));
                to.text(allowed)
            }
            ErrorKind::Config { op, field, why } => to.u8(7).text(op).text(field).text(why),
            ErrorKind::State { name, why } => to.u8(13).text(name).text(why),
            ErrorKind::Format { what, why } => to.u8(14).text(what).text(why),
            kind => match reason(kind) {
                Some((tag, op, why)) => to.u8(tag).text(op).text(why),
                None => to.u8(4).text(&self.kind().to_string()),
            },
        };
        self.rank().write(to);
        to.text(self.path());
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let error = match from.u8()? {
            0 => {
                let (op, peer, cause) = (Portable::read(from)?, from.usize()?, Portable::read(from)?);
                Error::from(ErrorKind::Peer { op, peer, cause })
            }
            2 => {
                let (op, waited) = (Portable::read(from)?, Portable::read(from)?);
                let (missing, called) = (from.list()?, Portable::read(from)?);
                Error::from(ErrorKind::Timeout { op, waited, missing, called, calls: Portable::read(from)? })
            }
            4 => Error::argument("rank", from.text()?.to_string()),
            5 => Error::from(ErrorKind::MissingGradient { names: Portable::read(from)? }),
            6 => {
                let (op, name, value) = (Portable::read(from)?, Portable::read(from)?, Scalar::read(from)?);
                Error::range(op, name, value, String::read(from)?)
            }
            7 => Error::config(Portable::read(from)?, Portable::read(from)?, String::read(from)?),
            13 => Error::state(String::read(from)?, String::read(from)?),
            14 => Error::format(String::read(from)?, String::read(from)?),
            tag => of_reason(tag, from)?,
        };
        let rank = Option::<usize>::read(from)?;
        let error = error.within(from.text()?);
        Ok(match rank {
            Some(rank) => error.on_rank(rank),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_kind_come_back() {
        let map: BTreeMap<String, (f32, bool)> = [("a".to_string(), (f32::MIN, true))].into();
        let value = (vec![Some(1.5f64), None], [3usize, 4], map, ("é".to_string(), Duration::from_millis(3)));
        assert_eq!(<_>::from_bytes(&value.to_bytes()).ok(), Some(value.clone()));
        let bytes = value.to_bytes();
        let read = |bytes: &[u8]| {
            <(Vec<Option<f64>>, [usize; 2], BTreeMap<String, (f32, bool)>, (String, Duration))>::from_bytes(bytes)
        };
        assert!((0..bytes.len()).all(|end| read(&bytes[..end]).is_err()));
    }

    #[test]
    fn errors_stay_what_they_are() {
        let peer = Error::from(ErrorKind::Peer { op: "send", peer: 3, cause: "no".into() }).on_rank(1);
        let timeout = ErrorKind::Timeout {
            op: "recv",
            waited: Duration::from_secs(1),
            missing: vec![2],
            called: true,
            calls: "last calls:".into(),
        };
        let others = [
            Error::argument("x", "y").on_rank(2),
            Error::range("x", "y", -1.5, "at least 0"),
            Error::range("x", "y", u64::MAX, "in 0..3"),
            Error::range("x", "y", -1, "in 0..3"),
            Error::config("x", "field", "y"),
            Error::state("x", "y"),
            Error::format("x", "y"),
            Error::mismatch("x", "y"),
            Error::usage("x", "y"),
            Error::anomaly("x", "y"),
            Error::schedule("x", "y"),
            Error::internal("x", "y"),
            Error::unsupported("x", "y"),
        ];
        for error in [peer, Error::from(timeout).on_rank(0)].into_iter().chain(others) {
            let back = Error::from_bytes(&error.to_bytes()).unwrap();
            assert_eq!((back.to_string(), back.rank()), (error.to_string(), error.rank()));
            assert_eq!(std::mem::discriminant(back.kind()), std::mem::discriminant(error.kind()));
        }
    }
}
