//! The order in which experts compute tokens.

use numcore::{Error, Result, Within};

use super::DropBy;

/// Tokens ordered by the expert that they picked. Host data: its sizes decide how many kernels run.
///
/// A *choice* is one of the `T · k` pairs of a token and an expert that it picked, numbered token by token. The rows
/// that experts compute are choices ordered by expert, those of one expert by position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenOrder {
    counts: Vec<usize>,
    picked: Vec<usize>,
    choices: Vec<i64>,
    top_k: usize,
}

impl TokenOrder {
    /// The order of choices: `experts[choice]` is the expert, of which there are `count`, and each token has `top_k`
    /// choices.
    ///
    /// # Errors
    /// If a choice names no expert, or the choices are no multiple of `top_k`.
    #[track_caller]
    pub fn new(experts: &[i64], top_k: usize, count: usize) -> Result<Self> {
        if top_k == 0 {
            return Err(Error::range("TokenOrder", "number of choices for a token", 0usize, "at least 1")).at_caller();
        }
        if !experts.len().is_multiple_of(top_k) {
            let allowed = format!("{top_k} for each token");
            return Err(Error::range("TokenOrder", "number of choices", experts.len(), allowed)).at_caller();
        }
        let mut counts = vec![0; count];
        for (choice, &expert) in experts.iter().enumerate() {
            let wrong = || Error::range("TokenOrder", "expert", expert, format!("in 0..{count}, as choice {choice}"));
            *usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert)).ok_or_else(wrong).at_caller()? += 1;
        }
        let mut ends: Vec<usize> = counts.iter().scan(0, |end, n| Some(std::mem::replace(end, *end + n))).collect();
        let mut choices = vec![0; experts.len()];
        for (choice, &expert) in experts.iter().enumerate() {
            let end = &mut ends[expert as usize];
            choices[*end] = choice as i64;
            *end += 1;
        }
        Ok(TokenOrder { picked: counts.clone(), counts, choices, top_k })
    }

    /// This order with at most `limit` rows for each expert. `weights[choice]` decides by [`DropBy::Weight`]; what
    /// stays keeps its order.
    pub fn limited(self, limit: usize, drop: DropBy, weights: &[f64]) -> Self {
        let limits = vec![limit; self.counts.len()];
        self.limited_each(&limits, drop, weights)
    }

    /// This order with at most `limits[e]` rows for expert `e`, and all for one without a limit; else as
    /// [`limited`](TokenOrder::limited).
    pub(crate) fn limited_each(mut self, limits: &[usize], drop: DropBy, weights: &[f64]) -> Self {
        let mut rest = std::mem::take(&mut self.choices);
        let limits = limits.iter().copied().chain(std::iter::repeat(usize::MAX));
        for (count, limit) in self.counts.iter_mut().zip(limits) {
            let mut own: Vec<i64> = rest.drain(..*count).collect();
            if own.len() > limit {
                if drop == DropBy::Weight {
                    // Stable: of equal weights the first stays.
                    own.sort_by(|a, b| weights[*b as usize].total_cmp(&weights[*a as usize]));
                }
                own.truncate(limit);
                own.sort_unstable();
                *count = limit;
            }
            self.choices.extend(own);
        }
        self
    }

    /// This order without the choices of all but the first `tokens`, which are dropped.
    pub(super) fn of_first(mut self, tokens: usize) -> Self {
        let end = (tokens * self.top_k) as i64;
        let mut rest = std::mem::take(&mut self.choices);
        for count in &mut self.counts {
            let before = self.choices.len();
            self.choices.extend(rest.drain(..*count).filter(|choice| *choice < end));
            *count = self.choices.len() - before;
        }
        self
    }

    /// The choices of an expert, by position.
    pub(super) fn choices_of(&self, expert: usize) -> impl Iterator<Item = usize> {
        let start: usize = self.counts[..expert].iter().sum();
        self.choices[start..start + self.counts[expert]].iter().map(|&choice| choice as usize)
    }

    /// The number of rows of each expert.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// The load of each expert: its choices, dropped ones included.
    pub fn picked(&self) -> &[usize] {
        &self.picked
    }

    /// The number of computed choices.
    pub fn rows(&self) -> usize {
        self.choices.len()
    }

    /// The number of dropped choices.
    pub fn dropped(&self) -> usize {
        self.picked.iter().sum::<usize>() - self.rows()
    }

    /// The token of every row.
    pub fn tokens(&self) -> Vec<i64> {
        self.choices.iter().map(|choice| choice / self.top_k as i64).collect()
    }

    /// The row of every choice. A dropped choice has the row after the last.
    pub(crate) fn row_of_choice(&self) -> Vec<i64> {
        let mut rows = vec![self.rows() as i64; self.picked.iter().sum()];
        for (row, &choice) in self.choices.iter().enumerate() {
            rows[choice as usize] = row as i64;
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHOICES: [i64; 8] = [2, 0, 2, 1, 2, 0, 0, 2];

    #[test]
    fn choices_are_ordered_by_expert_then_position() {
        let order = TokenOrder::new(&CHOICES, 2, 4).unwrap();
        assert_eq!(order.counts(), [3, 1, 4, 0]);
        assert_eq!(order.choices, [1, 5, 6, 3, 0, 2, 4, 7]);
        assert_eq!(order.tokens(), [0, 2, 3, 1, 0, 1, 2, 3]);
        assert_eq!(order.row_of_choice(), [4, 0, 5, 3, 6, 1, 2, 7]);
        assert_eq!(order.dropped(), 0);
    }

    #[test]
    fn what_exceeds_the_limit_is_dropped() {
        let order = TokenOrder::new(&CHOICES, 2, 4).unwrap();
        let weights = [0.1, 0.9, 0.4, 0.5, 0.4, 0.2, 0.8, 0.4];
        let by_position = order.clone().limited(2, DropBy::Position, &weights);
        assert_eq!((by_position.choices.as_slice(), by_position.dropped()), (&[1, 5, 3, 0, 2][..], 3));
        assert_eq!(by_position.row_of_choice(), [3, 0, 4, 2, 5, 1, 5, 5]);
        let by_weight = order.clone().limited(2, DropBy::Weight, &weights);
        assert_eq!(by_weight.choices, [1, 6, 3, 2, 4]);
        assert_eq!((by_weight.counts(), by_weight.picked()), (&[2, 1, 2, 0][..], order.picked()));
        assert_eq!(order.clone().limited(4, DropBy::Weight, &weights), order);
        let first = order.clone().of_first(2);
        assert_eq!((first.counts(), first.tokens()), (&[1, 1, 2, 0][..], vec![0, 1, 0, 1]));
        assert_eq!(first.row_of_choice(), [2, 0, 3, 1, 4, 4, 4, 4]);
    }

    #[test]
    fn choices_that_name_nothing_are_errors() {
        for (experts, top_k, words) in [
            (&[0, 4][..], 1, "expert is 4, and must be in 0..4, as choice 1"),
            (&[-1], 1, "expert is -1, and must be in 0..4, as choice 0"),
            (&[0, 1, 2], 2, "number of choices is 3, and must be 2 for each token"),
            (&[0], 0, "number of choices for a token is 0, and must be at least 1"),
        ] {
            let error = TokenOrder::new(experts, top_k, 4).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(TokenOrder::new(&[], 2, 3).unwrap().counts(), [0; 3]);
    }
}
