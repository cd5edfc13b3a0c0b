//! The wire form of a fingerprint.

use std::sync::Arc;

use numcore::{DType, Result};

use super::{
    Collective, Fingerprint, Place, ReduceOp,
    wire::{WireReader, Writer, malformed},
};

pub(super) const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max];

impl Fingerprint {
    /// Writes the wire form, which another process reads with [`from_bytes`](Fingerprint::from_bytes).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        let (kind, rank) = kind(&self.what);
        w.u8(kind).usize(rank).u8(self.what.reduce_op().map_or(0, |op| op as u8)).u8(self.dtype as u8);
        w.u8(u8::from(self.in_place) | u8::from(self.header) << 1).list(&self.parts);
        w.u8(self.of.is_some().into()).text(self.of.as_deref().unwrap_or_default());
        w.text(&self.at.file).u64(self.at.line.into()).u64(self.at.column.into());
        w.finish()
    }

    /// Reads the fingerprint that another process wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Fingerprint> {
        let mut r = WireReader::new(bytes);
        let (kind, rank, op, dtype) = (r.u8()?, r.usize()?, r.u8()?, r.u8()?);
        let op = OPS.into_iter().find(|o| *o as u8 == op).ok_or_else(|| malformed("a reduction"))?;
        let what = collective(kind, rank, op).ok_or_else(|| malformed("a collective"))?;
        let dtype = DType::ALL.into_iter().find(|d| *d as u8 == dtype).ok_or_else(|| malformed("an element type"))?;
        let (flags, parts) = (r.u8()?, r.list()?.into());
        let (in_place, header) = (flags & 1 != 0, flags & 2 != 0);
        let (named, of) = (r.u8()? != 0, r.text()?);
        let of = named.then(|| Arc::from(of));
        let file = r.text()?.to_string().into();
        let mut number = || u32::try_from(r.u64()?).map_err(|_| malformed("a line"));
        let at = Place { file, line: number()?, column: number()? };
        r.finish()?;
        Ok(Fingerprint { what, dtype, in_place, header, parts, of, at })
    }

    /// A hash of 128 bits for engines that compare fingerprints beside the exchange (FNV-1a of the wire form).
    pub fn digest(&self) -> u128 {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        self.to_bytes().iter().fold(OFFSET, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
    }
}

fn kind(what: &Collective) -> (u8, usize) {
    match *what {
        Collective::AllReduce(_) => (0, 0),
        Collective::Reduce { root, .. } => (1, root),
        Collective::ReduceScatter(_) => (2, 0),
        Collective::AllGather => (3, 0),
        Collective::Broadcast { root } => (4, root),
        Collective::AllToAll => (5, 0),
        Collective::Barrier => (6, 0),
        Collective::Send { to } => (7, to),
        Collective::Recv { from } => (8, from),
    }
}

fn collective(kind: u8, rank: usize, op: ReduceOp) -> Option<Collective> {
    Some(match kind {
        0 => Collective::AllReduce(op),
        1 => Collective::Reduce { op, root: rank },
        2 => Collective::ReduceScatter(op),
        3 => Collective::AllGather,
        4 => Collective::Broadcast { root: rank },
        5 => Collective::AllToAll,
        6 => Collective::Barrier,
        7 => Collective::Send { to: rank },
        8 => Collective::Recv { from: rank },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Places;
    use super::*;

    fn all() -> Vec<Fingerprint> {
        let at = Place { file: "a/b.rs".into(), line: 3, column: 9 };
        let of = |what, dtype| Fingerprint {
            what,
            dtype,
            in_place: false,
            header: false,
            parts: [1, 2].into(),
            of: None,
            at: at.clone(),
        };
        let mut all: Vec<Fingerprint> = DType::ALL.into_iter().map(|dtype| of(Collective::AllGather, dtype)).collect();
        all.extend((0..9).filter(|&k| k != 3).map(|k| of(collective(k, 5, ReduceOp::Sum).unwrap(), DType::F32)));
        all.extend(OPS[1..].iter().map(|&op| of(Collective::AllReduce(op), DType::F32)));
        let first = all[0].clone();
        all.push(Fingerprint { in_place: true, ..first.clone() });
        all.push(Fingerprint { header: true, ..first.clone() });
        all.push(Fingerprint { parts: [].into(), ..first.clone() });
        all.push(Fingerprint { of: Some("".into()), ..first.clone() });
        all.push(Fingerprint { of: Some("bucket 3".into()), ..first.clone() });
        all.push(Fingerprint { at: Place { line: 4, ..at.clone() }, ..first.clone() });
        all.push(Fingerprint { at: Place { column: 4, ..at.clone() }, ..first });
        all
    }

    #[test]
    fn only_equal_calls_agree() {
        let all = all();
        for a in &all {
            for b in &all {
                assert_eq!(a.agrees(b, Places::Same), a == b, "{a:?} and {b:?}");
            }
        }
    }

    #[test]
    fn every_fingerprint_travels_and_has_a_digest_of_its_own() {
        let mut digests = std::collections::BTreeSet::new();
        for own in all() {
            let bytes = own.to_bytes();
            assert_eq!(Fingerprint::from_bytes(&bytes).unwrap(), own);
            assert!(digests.insert(own.digest()), "{own}");
            assert!((0..bytes.len()).all(|end| Fingerprint::from_bytes(&bytes[..end]).is_err()));
        }
    }

    #[test]
    fn the_digest_is_fnv() {
        let first = all()[0].clone();
        let by_hand = first.to_bytes().iter().fold(144066263297769815596495629667062367629u128, |h, &b| {
            (h ^ u128::from(b)).wrapping_mul(309485009821345068724781371)
        });
        assert_eq!(first.digest(), by_hand);
    }
}
