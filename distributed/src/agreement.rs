//! What all ranks must have alike, compared line by line.

use numcore::{Error, ErrorKind, Result, Runtime};

use crate::comm::{Collectives, Comm, Communicator};

/// An error on every rank unless all give the same text; `what` says in the message what it describes. The error has the first line that
/// differs: a parameter, where a model is described by a line for each. Blocks.
#[track_caller]
pub(crate) fn agree_on_lines<R: Runtime>(comm: &Comm<R>, what: &str, text: &str) -> Result<()> {
    let all = comm.exchange(text.as_bytes())?;
    let others: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] != all[0]).collect();
    let Some(&first) = others.first() else { return Ok(()) };
    let world = |rank: usize| comm.members()[rank];
    let named: Vec<String> = others.iter().map(|&rank| world(rank).to_string()).collect();
    let [here, there] = [&all[0], &all[first]].map(|text| String::from_utf8_lossy(text).into_owned());
    let (here, there) = first_difference(&here, &there);
    let why = format!(
        "{what} of rank {} is not that of rank {}: rank {} has {here}, rank {} {there}",
        world(0),
        named.join(", "),
        world(0),
        world(first)
    );
    Err(Error::from(ErrorKind::Mismatch { op: "agree", why }).on_rank(comm.world_rank()))
}

/// The first line in which two texts differ, as each has it.
fn first_difference(here: &str, there: &str) -> (String, String) {
    let said = |line: Option<&str>| line.map_or("nothing more".into(), |line| format!("`{line}`"));
    let (mut here, mut there) = (here.lines(), there.lines());
    loop {
        match (here.next(), there.next()) {
            (Some(a), Some(b)) if a == b => {}
            (a, b) => return (said(a), said(b)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(first_difference("a\nb\nc", "a\nB\nC"), pair("`b`", "`B`"));
        assert_eq!(first_difference("a", "a\nb"), pair("nothing more", "`b`"));
    }
}
