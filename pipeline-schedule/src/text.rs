//! Actions as text: `2F0`, `1SEND_F3`, `2UNSHARD`, `(0F1;1B0)OVERLAP_F_B`.
//!
//! The parts are stage, word and micro-batch; units have no micro-batch. The notation is that of
//! `torch.distributed.pipelining`, which has three more words: `WAIT_SEND_F`, `WAIT_SEND_B` and `WAIT_REDUCE_GRAD`.
//! They are ends of asynchronous actions, which have no action of their own in this crate (see [`csv`](super::csv)).

use std::{fmt, str::FromStr};

use numcore::{Error, Result};

use super::action::{Action, Compute, Direction, End, Message, Pass, UnitAction, UnitOp};

/// The words between stage and micro-batch.
const WORDS: [(&str, ActionWord); 11] = [
    ("F", ActionWord::Pass(Pass::F)),
    ("B", ActionWord::Pass(Pass::B)),
    ("I", ActionWord::Pass(Pass::I)),
    ("W", ActionWord::Pass(Pass::W)),
    ("SEND_F", ActionWord::Message(End::Send, Direction::Forward)),
    ("RECV_F", ActionWord::Message(End::Recv, Direction::Forward)),
    ("SEND_B", ActionWord::Message(End::Send, Direction::Backward)),
    ("RECV_B", ActionWord::Message(End::Recv, Direction::Backward)),
    ("UNSHARD", ActionWord::Unit(UnitOp::Unshard)),
    ("RESHARD", ActionWord::Unit(UnitOp::Reshard)),
    ("REDUCE_GRAD", ActionWord::Unit(UnitOp::ReduceGrad)),
];
const OVERLAP: &str = "OVERLAP_F_B";

#[derive(Clone, Copy, Debug, PartialEq)]
enum ActionWord {
    Pass(Pass),
    Message(End, Direction),
    Unit(UnitOp),
}

impl ActionWord {
    fn of(action: &Action) -> Option<ActionWord> {
        Some(match action {
            Action::Compute(compute) => ActionWord::Pass(compute.pass),
            Action::Message(message) => ActionWord::Message(message.end, message.direction),
            Action::Unit(unit) => ActionWord::Unit(unit.op),
            Action::Overlap(..) => return None,
        })
    }

    fn text(self) -> &'static str {
        WORDS.iter().find(|(_, word)| *word == self).map_or("", |(text, _)| text)
    }

    /// The action of this word; `None` if a micro-batch is missing, or present for a unit.
    fn action(self, stage: usize, micro: Option<usize>) -> Option<Action> {
        Some(match self {
            ActionWord::Pass(pass) => Compute { stage, pass, micro: micro? }.into(),
            ActionWord::Message(end, direction) => Message { stage, direction, end, micro: micro? }.into(),
            ActionWord::Unit(op) if micro.is_none() => UnitAction { stage, op }.into(),
            ActionWord::Unit(_) => return None,
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Action::Overlap(forward, backward) = *self {
            return write!(f, "({};{}){OVERLAP}", Action::from(forward), Action::from(backward));
        }
        for stage in self.stages() {
            write!(f, "{stage}")?;
        }
        f.write_str(ActionWord::of(self).map_or("", ActionWord::text))?;
        for micro in self.micros() {
            write!(f, "{micro}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Action::from(*self).fmt(f)
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Action::from(*self).fmt(f)
    }
}

impl fmt::Display for UnitAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Action::from(*self).fmt(f)
    }
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Action> {
        let text = text.trim();
        let parsed = if text.starts_with('(') { overlap(text) } else { single(text) };
        parsed.ok_or_else(|| Error::format(format!("action `{text}`"), expectation()))
    }
}

fn expectation() -> String {
    let words: Vec<&str> = WORDS.iter().map(|(text, _)| *text).collect();
    format!(
        "expected stage, one of {}, and a micro-batch except for the last three (`2F0`, `2UNSHARD`), or `(0F1;1B0){OVERLAP}`",
        words.join(" ")
    )
}

fn single(text: &str) -> Option<Action> {
    let (stage, rest) = number(text)?;
    let (word, micro) = rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
    let word = WORDS.iter().find(|(text, _)| *text == word)?.1;
    let micro = if micro.is_empty() { None } else { Some(number(micro).filter(|(_, rest)| rest.is_empty())?.0) };
    word.action(stage, micro)
}

fn overlap(text: &str) -> Option<Action> {
    let (forward, backward) = text.strip_prefix('(')?.strip_suffix(OVERLAP)?.strip_suffix(')')?.split_once(';')?;
    match (single(forward.trim())?, single(backward.trim())?) {
        (Action::Compute(f), Action::Compute(b))
            if f.pass == Pass::F && b.pass.makes() == Some(Direction::Backward) =>
        {
            Some(Action::Overlap(f, b))
        }
        _ => None,
    }
}

/// The prefix of torch's three further words: the end of an asynchronous send or reduction.
const WAIT: &str = "WAIT_";

/// The action whose end a cell of torch waits for; none for other cells. `1WAIT_SEND_F3` waits for `1SEND_F3`.
pub(super) fn waited_for(text: &str) -> Option<Action> {
    let (stage, rest) = number(text.trim())?;
    let action = single(&format!("{stage}{}", rest.strip_prefix(WAIT)?))?;
    is_asynchronous(&action).then_some(action)
}

/// The cell in which torch waits for an action; none for synchronous actions.
pub(super) fn wait_for(action: &Action) -> Option<String> {
    let text = action.to_string();
    let (stage, word) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    is_asynchronous(action).then(|| format!("{stage}{WAIT}{word}"))
}

fn is_asynchronous(action: &Action) -> bool {
    matches!(
        action,
        Action::Message(Message { end: End::Send, .. }) | Action::Unit(UnitAction { op: UnitOp::ReduceGrad, .. })
    )
}

/// A decimal number and the text after it.
fn number(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reads_back() {
        for (stage, micro) in [(0, 0), (2, 11), (130, 7)] {
            for (text, word) in WORDS {
                let unit = matches!(word, ActionWord::Unit(_));
                let written = if unit { format!("{stage}{text}") } else { format!("{stage}{text}{micro}") };
                let action: Action = written.parse().unwrap();
                assert_eq!(ActionWord::of(&action), Some(word));
                assert_eq!(action.to_string(), written);
            }
        }
    }

    #[test]
    fn overlaps_read_back() {
        let action: Action = "(0F1;1B0)OVERLAP_F_B".parse().unwrap();
        assert_eq!(action.computes().count(), 2);
        assert_eq!(action.to_string(), "(0F1;1B0)OVERLAP_F_B");
        assert_eq!(" ( 0F1 ; 1B0 )OVERLAP_F_B ".parse::<Action>().unwrap(), action);
    }

    #[test]
    fn waits_read_back() {
        for text in ["1SEND_F3", "12SEND_B0", "0REDUCE_GRAD"] {
            let action: Action = text.parse().unwrap();
            let wait = wait_for(&action).unwrap();
            assert_eq!(waited_for(&format!(" {wait} ")), Some(action));
            assert!(wait.parse::<Action>().is_err(), "a wait is no action");
        }
        assert_eq!(wait_for(&"1SEND_F3".parse().unwrap()).unwrap(), "1WAIT_SEND_F3");
        for text in ["1F3", "1RECV_F3", "1UNSHARD", "(0F1;1B0)OVERLAP_F_B"] {
            assert_eq!(wait_for(&text.parse().unwrap()), None);
        }
        for text in ["1WAIT_F3", "1WAIT_RECV_F3", "1WAIT_SEND_F", "WAIT_SEND_F3", "1WAIT_REDUCE_GRAD0", "1WAIT_", ""] {
            assert_eq!(waited_for(text), None, "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_its_text() {
        for text in [
            "",
            "F0",
            "2",
            "2F",
            "2X0",
            "2f0",
            "2F0x",
            "2F-1",
            "2UNSHARD0",
            "2SEND_F",
            "2OVERLAP_F_B",
            "(0F1)OVERLAP_F_B",
            "(0F1;1F0)OVERLAP_F_B",
            "(1B0;0F1)OVERLAP_F_B",
            "(0F1;1W0)OVERLAP_F_B",
            "(0F1;1B0)F",
            "(0F1;1B0OVERLAP_F_B",
            "99999999999999999999999F0",
        ] {
            let error = text.parse::<Action>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("action `{text}`: expected stage")), "{error}");
        }
    }
}
