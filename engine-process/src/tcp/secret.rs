//! The proof, at the beginning of every connection, that both ends know the secret of their job.
//!
//! The end that has connected proves first, so that a stranger gets nothing to try secrets on. Both prove for the
//! random numbers of both, under different labels: no answer of another connection, and none of the other end, fits.

use std::{
    fmt,
    io::{self, Read, Write},
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The first bytes of a connection: the protocol and its version.
const MAGIC: &[u8; 16] = b"weftgrad tcp 001";
const NONCE: usize = 32;
const PROOF: usize = 32;
/// The fewest bytes of a secret: those who overhear a proof can try short ones.
const SHORTEST: usize = 16;
/// The byte before the second proof, if the first was right.
const PROVEN: u8 = 1;

/// The secret of a job; empty on a loopback address without one.
#[derive(Clone, Default)]
pub(super) struct Secret(Vec<u8>);

/// The end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    Dialer,
    Listener,
}

impl Secret {
    pub(super) fn new(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() < SHORTEST {
            return Err(format!("a secret of {} bytes is too short: `openssl rand -hex 32` prints one", bytes.len()));
        }
        Ok(Secret(bytes.to_vec()))
    }

    fn proof(&self, of: ConnectionEnd, nonces: [&[u8; NONCE]; 2]) -> io::Result<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(io::Error::other)?;
        mac.update(MAGIC);
        mac.update(if of == ConnectionEnd::Dialer { b"dialer" } else { b"listener" });
        nonces.iter().for_each(|nonce| mac.update(*nonce));
        Ok(mac)
    }

    /// Proves the secret to the other end and checks its proof, before anything else is read.
    pub(super) fn prove(&self, stream: &mut (impl Read + Write), own: ConnectionEnd) -> io::Result<()> {
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        self.prove_with(stream, own, &nonce)
    }

    pub(super) fn prove_with(
        &self,
        stream: &mut (impl Read + Write),
        own: ConnectionEnd,
        nonce: &[u8; NONCE],
    ) -> io::Result<()> {
        let greeting = [&MAGIC[..], nonce].concat();
        let mut theirs = [0; NONCE];
        if own == ConnectionEnd::Dialer {
            stream.write_all(&greeting)?;
            read_greeting(stream, &mut theirs)?;
            let proof = |of| self.proof(of, [nonce, &theirs]);
            stream.write_all(&proof(ConnectionEnd::Dialer)?.finalize().into_bytes())?;
            let [answer] = read(stream)?;
            if answer != PROVEN {
                return Err(denied("the secret of this process is not that of the one that listens"));
            }
            return check(proof(ConnectionEnd::Listener)?, &read(stream)?);
        }
        read_greeting(stream, &mut theirs)?;
        stream.write_all(&greeting)?;
        let proof = |of| self.proof(of, [&theirs, nonce]);
        if let Err(error) = check(proof(ConnectionEnd::Dialer)?, &read(stream)?) {
            // The error to report is the wrong proof.
            let _ = stream.write_all(&[0]);
            return Err(error);
        }
        stream.write_all(&[&[PROVEN], &proof(ConnectionEnd::Listener)?.finalize().into_bytes()[..]].concat())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_greeting(stream: &mut impl Read, nonce: &mut [u8; NONCE]) -> io::Result<()> {
    let magic: [u8; MAGIC.len()] = read(stream)?;
    if &magic != MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the other end is not a process of weftgrad's version"));
    }
    stream.read_exact(nonce)
}

/// Compares in constant time.
fn check(expected: Hmac<Sha256>, proof: &[u8; PROOF]) -> io::Result<()> {
    expected.verify_slice(proof).map_err(|_| denied("the other end does not know the secret of this job"))
}

fn denied(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}
