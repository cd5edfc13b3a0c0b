//! Metrics of texts: [`ErrorRate`], [`Bleu`], [`Rouge`].

use std::collections::BTreeMap;

use numcore::Result;

use super::{Mean, Metric, bytes};

/// The number of insertions, deletions and replacements that turn a text into the right one, over the right one's
/// length (Levenshtein's distance). It may exceed 1; without right words there is no value.
///
/// Case and punctuation count; white space only separates words.
///
/// ```
/// use watch::metrics::{ErrorRate, Metric};
/// let mut rate = ErrorRate::words();
/// rate.update("a cat sat on mats", "the cat sat on the mat");
/// assert_eq!(rate.value(), Some(3.0 / 6.0));
/// ```
#[doc(alias("WER", "CER", "WordErrorRate", "CharErrorRate"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorRate {
    by_words: bool,
    edits: u64,
    length: u64,
}

impl ErrorRate {
    /// Makes the error rate of words, WER.
    pub fn words() -> Self {
        ErrorRate { by_words: true, edits: 0, length: 0 }
    }

    /// Makes the error rate of characters, CER; one space is between words, and counts.
    pub fn characters() -> Self {
        ErrorRate { by_words: false, ..Self::words() }
    }

    /// Counts a text against the right one.
    pub fn update(&mut self, given: &str, right: &str) {
        let (given, right): (Vec<&str>, Vec<&str>) =
            (given.split_whitespace().collect(), right.split_whitespace().collect());
        let (edits, length) = if self.by_words {
            (distance(&given, &right), right.len())
        } else {
            let characters = |words: &[&str]| words.join(" ").chars().collect::<Vec<_>>();
            let (given, right) = (characters(&given), characters(&right));
            (distance(&given, &right), right.len())
        };
        (self.edits, self.length) = (self.edits + edits as u64, self.length + length as u64);
    }
}

/// The least number of insertions, deletions and replacements.
fn distance<T: PartialEq>(given: &[T], right: &[T]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in given.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

impl Metric for ErrorRate {
    fn counted(&self) -> Vec<u8> {
        bytes::of([self.edits, self.length])
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "ErrorRate::absorb";
        let [edits, length] = bytes::read(OP, counted)?.try_into().map_err(|_| bytes::other(OP))?;
        (self.edits, self.length) = (self.edits + edits, self.length + length);
        Ok(())
    }

    fn reset(&mut self) {
        (self.edits, self.length) = (0, 0);
    }

    fn value(&self) -> Option<f64> {
        (self.length > 0).then(|| self.edits as f64 / self.length as f64)
    }
}

/// The longest n-grams of BLEU.
const ORDER: usize = 4;

/// BLEU of a corpus, from 0 to 1: the mean precision of 1- to 4-grams, geometric, less for short texts (Papineni et al.
/// 2002).
///
/// Words, smoothing and lengths are those of sacreBLEU's defaults: `13a`, `exp`, and the closest reference. Its score
/// is 100 times this one.
#[doc(alias = "BLEUScore")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bleu {
    /// N-grams that a reference has too, and all of them.
    matches: [u64; ORDER],
    all: [u64; ORDER],
    length: u64,
    reference_length: u64,
    texts: u64,
}

impl Bleu {
    /// Makes a metric without texts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a text against its references, each of which may be right. A text without references counts nothing.
    pub fn update(&mut self, given: &str, references: &[&str]) {
        let (given, references) = (words_13a(given), references.iter().map(|r| words_13a(r)).collect::<Vec<_>>());
        let off = |reference: &Vec<String>| (reference.len().abs_diff(given.len()), reference.len());
        let Some(closest) = references.iter().min_by_key(|reference| off(reference)) else { return };
        self.texts += 1;
        self.length += given.len() as u64;
        self.reference_length += closest.len() as u64;
        for n in 1..=ORDER {
            let known: Vec<_> = references.iter().map(|reference| grams(reference, n)).collect();
            for (gram, count) in grams(&given, n) {
                let most = known.iter().filter_map(|known| known.get(gram)).max().copied().unwrap_or(0);
                self.matches[n - 1] += count.min(most);
                self.all[n - 1] += count;
            }
        }
    }

    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let lengths = [&mut self.length, &mut self.reference_length, &mut self.texts];
        self.matches.iter_mut().chain(&mut self.all).chain(lengths)
    }
}

impl Metric for Bleu {
    fn counted(&self) -> Vec<u8> {
        bytes::of(self.clone().numbers().map(|number| *number))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const OP: &str = "Bleu::absorb";
        let others = bytes::read(OP, counted)?;
        if others.len() != self.numbers().count() {
            return Err(bytes::other(OP));
        }
        self.numbers().zip(others).for_each(|(own, other)| *own += other);
        Ok(())
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn value(&self) -> Option<f64> {
        if self.texts == 0 {
            return None;
        }
        if self.matches == [0; ORDER] || self.all.contains(&0) {
            return Some(0.0);
        }
        let mut unmatched = 1.0;
        let logarithm = |(&matches, &all): (&u64, &u64)| {
            if matches > 0 {
                return (matches as f64 / all as f64).ln();
            }
            unmatched *= 2.0;
            (1.0 / (unmatched * all as f64)).ln()
        };
        let mean = self.matches.iter().zip(&self.all).map(logarithm).sum::<f64>() / ORDER as f64;
        let short = (1.0 - self.reference_length as f64 / self.length as f64).min(0.0);
        Some((short + mean).exp())
    }
}

/// The n-grams of a text with their numbers.
fn grams(words: &[String], n: usize) -> BTreeMap<&[String], u64> {
    words.windows(n).fold(BTreeMap::new(), |mut grams, gram| {
        *grams.entry(gram).or_default() += 1;
        grams
    })
}

/// The words of a text as `mteval-v13a.pl` separates them.
fn words_13a(text: &str) -> Vec<String> {
    let text = text.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    let text = [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")]
        .iter()
        .fold(text, |text, (name, character)| text.replace(name, character));
    let is_symbol = |c: char| matches!(c, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/');
    let apart = |c: char| if is_symbol(c) { vec![' ', c, ' '] } else { vec![c] };
    let text: Vec<char> = format!(" {text} ").chars().flat_map(apart).collect();
    let (is_digit, is_point) = (|c: char| c.is_ascii_digit(), |c: char| matches!(c, '.' | ','));
    let text = pairs(&text, |a, b| (!is_digit(a) && is_point(b)).then_some([a, ' ', b, ' ']));
    let text = pairs(&text, |a, b| (is_point(a) && !is_digit(b)).then_some([' ', a, ' ', b]));
    let text = pairs(&text, |a, b| (is_digit(a) && b == '-').then_some([a, ' ', b, ' ']));
    text.iter().collect::<String>().split_whitespace().map(str::to_owned).collect()
}

/// Replaces pairs of characters from left to right, each character in at most one.
fn pairs(text: &[char], replace: impl Fn(char, char) -> Option<[char; 4]>) -> Vec<char> {
    let (mut all, mut rest) = (Vec::new(), text);
    while let &[a, ref after @ ..] = rest {
        let replaced = after.first().and_then(|&b| replace(a, b));
        all.extend_from_slice(replaced.as_ref().map_or(&[a], |four| four));
        rest = if replaced.is_some() { &after[1..] } else { after };
    }
    all
}

/// The mean over texts of ROUGE's F1, from 0 to 1: what a text and its reference have in common (Lin 2004).
///
/// Words are lower-case runs of letters and digits, without stemming: for English texts those of the package
/// `rouge-score`.
#[doc(alias("ROUGEScore", "RougeL"))]
#[derive(Clone, Debug, PartialEq)]
pub struct Rouge {
    /// The words of an n-gram; none for the longest common subsequence.
    n: Option<usize>,
    mean: Mean,
}

impl Rouge {
    /// Makes ROUGE-N, of n-grams: 1 and 2 are common. No text has n-grams of 0 words.
    pub fn of_grams(n: usize) -> Self {
        Rouge { n: Some(n), mean: Mean::new() }
    }

    /// Makes ROUGE-L, of the longest common subsequence of words.
    pub fn longest() -> Self {
        Rouge { n: None, mean: Mean::new() }
    }

    /// Adds a text and its reference.
    pub fn update(&mut self, given: &str, reference: &str) {
        let (given, reference) = (words(given), words(reference));
        let (common, all) = match self.n {
            Some(0) => (0, 0),
            Some(n) => {
                let (own, other) = (grams(&given, n), grams(&reference, n));
                let common = own.iter().map(|(gram, count)| other.get(gram).map_or(0, |most| *count.min(most)));
                (common.sum(), own.values().sum::<u64>() + other.values().sum::<u64>())
            }
            None => (longest_common(&given, &reference), (given.len() + reference.len()) as u64),
        };
        self.mean.add(if all == 0 { 0.0 } else { 2.0 * common as f64 / all as f64 });
    }
}

fn words(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect()
}

/// The length of the longest common subsequence.
fn longest_common(given: &[String], reference: &[String]) -> u64 {
    let mut row = vec![0; reference.len() + 1];
    for a in given {
        let mut diagonal = 0;
        for (j, b) in reference.iter().enumerate() {
            let longest = if a == b { diagonal + 1 } else { row[j].max(row[j + 1]) };
            diagonal = std::mem::replace(&mut row[j + 1], longest);
        }
    }
    row[reference.len()]
}

impl Metric for Rouge {
    fn counted(&self) -> Vec<u8> {
        self.mean.counted()
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        self.mean.absorb(counted)
    }

    fn reset(&mut self) {
        self.mean.reset();
    }

    fn value(&self) -> Option<f64> {
        self.mean.value()
    }
}
