//! Attention of sequences that are cut over ranks: outputs and gradients are those of the whole sequence.

use nn::parallel::same_segment;

use crate::prelude::*;

const WORLDS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// An attention: its sizes, and what queries see.
#[derive(Clone, Copy, Debug)]
struct ContextCase {
    exchange: ContextExchange,
    dtype: DType,
    /// Sequences, heads of queries, heads of keys, width of keys, width of values.
    sizes: [usize; 5],
    tokens: usize,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f64>,
    segments: bool,
    /// True if scores and mask are a program.
    program: bool,
}

impl ContextCase {
    /// Four tokens of each rank, and heads that the ranks divide.
    fn new(exchange: ContextExchange, c: usize) -> Self {
        ContextCase {
            exchange,
            dtype: DType::F64,
            sizes: [2, 2 * c, c, 4, 4],
            tokens: 4 * c,
            causal: true,
            window: None,
            softcap: None,
            segments: false,
            program: false,
        }
    }

    /// A program that depends on heads, queries, keys and documents, with its arguments for all heads.
    fn program(&self, rt: &Cpu) -> Result<(AttentionProgram, [Var<Cpu>; 3])> {
        let causal = self.causal;
        let program = AttentionProgram::over(3)
            .score(|s, at, args| (s + args[0] * (at.key - at.query + at.head).cast_like(s)).tanh())
            .mask(move |at, args| {
                let same = args[1].eq(args[2]) | (at.key % 3).eq(0);
                if causal { same & at.key.le(at.query) } else { same }
            });
        let slopes = Tensor::normal(rt, [self.sizes[1], 1, 1], DType::F64, 0.0, 0.1, 5)?.to_dtype(self.dtype)?;
        let of = |i: usize| ((i % self.tokens) * (2 + i / self.tokens) / 5) as i64;
        let all: Vec<i64> = (0..self.sizes[0] * self.tokens).map(of).collect();
        let of_keys = Tensor::from_slice(rt, [self.sizes[0], 1, 1, self.tokens], &all)?;
        let of_queries = of_keys.transpose(2, 3)?;
        Ok((program, [slopes, of_queries, of_keys].map(Var::new)))
    }

    /// Queries, keys, values, and what the output is weighed by, of the whole sequence: views of heads, as projections give them.
    fn whole(&self, rt: &Cpu) -> Result<[Tensor<Cpu>; 4]> {
        let [b, h, g, d, e] = self.sizes;
        let value = |heads: usize, width: usize, seed: u64| {
            let x = Tensor::normal(rt, [b, self.tokens, heads, width], DType::F64, 0.0, 1.0, seed)?;
            x.to_dtype(self.dtype)?.transpose(1, 2)
        };
        Ok([value(h, d, 1)?, value(g, d, 2)?, value(g, e, 3)?, value(h, e, 4)?])
    }

    /// Documents of odd lengths, of which some begin and end within a chunk, and one is a token.
    fn documents(&self, rt: &Cpu) -> Result<Option<Var<Cpu>>> {
        if !self.segments {
            return Ok(None);
        }
        let of = |i: usize| ((i % self.tokens) * (2 + i / self.tokens) / 5 + usize::from(i % self.tokens > 2)) as i64;
        let all: Vec<i64> = (0..self.sizes[0] * self.tokens).map(of).collect();
        Ok(Some(Var::new(Tensor::from_slice(rt, [self.sizes[0], self.tokens], &all)?)))
    }

    /// The output and the gradients of queries, keys and values here, then the gradients of the sum of their squares.
    fn on(&self, comm: &Comm<Cpu>, twice: bool) -> Result<Vec<Vec<f64>>> {
        let rt = comm.runtime();
        let group = ContextRanks::group(comm, self.exchange);
        let part = group.part(self.tokens)?;
        let documents = self.documents(rt)?;
        let ContextCase { causal, window, softcap, .. } = *self;
        let window = (window, None);
        let (program, args) = self.program(rt)?;
        let args: Vec<&Var<Cpu>> = args.iter().collect();
        let (segments, program) = (documents.as_ref(), self.program.then_some((&program, &args[..])));
        let options = ContextAttention { causal, window, scale: None, softcap, segments, program };
        self.values(rt, &part, twice, |q, k, v| group.attention([q, k, v], options, "attention"))
    }

    /// What one rank makes of it, cut into the part of a rank.
    fn alone(&self, rt: &Cpu, part: &SequencePart, twice: bool) -> Result<Vec<Vec<f64>>> {
        let mask = self.documents(rt)?.map(|of| same_segment(&of, &of)).transpose()?;
        let ContextCase { causal, window, softcap, .. } = *self;
        let options =
            SdpaOptions { mask: mask.as_ref(), causal, window: (window, None), softcap, ..SdpaOptions::default() };
        let whole = SequencePart::whole(self.tokens);
        let (program, args) = self.program(rt)?;
        let all = self.values(rt, &whole, twice, |q, k, v| match self.program {
            true => program.attend(q, k, v, &args.iter().collect::<Vec<_>>()),
            false => q.attention_with(k, v, options),
        })?;
        let [b, h, g, d, e] = self.sizes;
        let shapes = [[h, e], [h, d], [g, d], [g, e], [h, d], [g, d], [g, e]];
        let cut = |(values, [heads, width]): (Vec<f64>, [usize; 2])| {
            part.take(&Tensor::from_slice(rt, [b, heads, self.tokens, width], &values)?, 2)?.to_vec::<f64>()
        };
        all.into_iter().zip(shapes).map(cut).collect()
    }

    fn values(
        &self,
        rt: &Cpu,
        part: &SequencePart,
        twice: bool,
        attention: impl FnOnce(&Var<Cpu>, &Var<Cpu>, &Var<Cpu>) -> Result<Var<Cpu>>,
    ) -> Result<Vec<Vec<f64>>> {
        let [q, k, v, weights] = self.whole(rt)?.map(|x| part.take(&x, 2));
        let [q, k, v] = [Var::leaf("q", q?)?, Var::leaf("k", k?)?, Var::leaf("v", v?)?];
        let o = attention(&q, &k, &v)?;
        let loss = o.mul(&Var::new(weights?))?.sum_all()?;
        let mut found = vec![o.detach()];
        let first = if twice { differentiable_grad } else { grad }(&[&loss], &[&q, &k, &v])?
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        found.extend(first.iter().map(Var::detach));
        if twice {
            let squares = first.iter().map(|g| g.square()?.sum_all()).collect::<Result<Vec<_>>>()?;
            let sum = squares[0].add(&squares[1])?.add(&squares[2])?;
            found.extend(grad(&[&sum], &[&q, &k, &v])?.into_iter().flatten());
        }
        found.iter().map(|x| x.to_dtype(DType::F64)?.value()?.to_vec::<f64>()).collect()
    }

    /// Requires what `c` ranks compute to be what one does, relative to the largest value of the whole, or 1: inputs are of that order.
    fn same(&self, c: usize, twice: bool, close: f64) {
        let found = Ranks::new(c).run(cpu, |comm| {
            let part = ContextRanks::group(&comm, self.exchange).part(self.tokens)?;
            Ok((self.on(&comm, twice)?, self.alone(comm.runtime(), &part, twice)?))
        });
        for (rank, (many, one)) in
            found.unwrap_or_else(|error| panic!("{c} ranks {self:?}: {error}")).into_iter().enumerate()
        {
            assert_eq!((many.len(), one.len()), (if twice { 7 } else { 4 }, if twice { 7 } else { 4 }));
            for (k, (many, one)) in many.iter().zip(&one).enumerate() {
                let scale = one.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                let off = many.iter().zip(one).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs() / scale));
                let finite = many.iter().all(|x| x.is_finite()) && many.len() == one.len();
                assert!(finite && off <= close, "value {k} of rank {rank} of {c}, {self:?}: {off:e}");
            }
        }
    }
}

const FORMS: [ContextExchange; 3] = [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses];

#[test]
fn every_form_is_the_attention_of_one_rank() {
    for exchange in FORMS {
        for c in WORLDS {
            // Chunks of two lengths, too.
            for tokens in [2 * c, 3 * c, 4 * c, 7 * c] {
                let case = ContextCase { tokens, ..ContextCase::new(exchange, c) };
                for (causal, segments) in [(false, false), (false, true), (true, false), (true, true)] {
                    ContextCase { causal, segments, ..case }.same(c, false, 1e-12);
                }
            }
        }
    }
}

#[test]
fn programs_have_the_positions_of_the_whole_sequence() {
    for exchange in FORMS {
        for c in WORLDS {
            for (tokens, causal) in [(4 * c, true), (7 * c, true), (5 * c, false)] {
                ContextCase { tokens, causal, program: true, ..ContextCase::new(exchange, c) }.same(c, false, 1e-12);
            }
        }
        for (c, heads) in [(2, [4, 1]), (4, [8, 2])] {
            let case = ContextCase { program: true, ..ContextCase::new(exchange, c) };
            ContextCase { sizes: [2, heads[0], heads[1], 4, 3], ..case }.same(c, true, 1e-11);
            ContextCase { dtype: DType::F32, ..case }.same(c, false, 1e-5);
        }
    }
}

#[test]
fn learned_arguments_have_the_sum_of_all_ranks_gradients() {
    let of = |comm: &Comm<Cpu>, exchange: ContextExchange| {
        let rt = comm.runtime();
        let case = ContextCase { program: true, tokens: 12, sizes: [2, 6, 3, 4, 4], ..ContextCase::new(exchange, 1) };
        let group = ContextRanks::group(comm, exchange);
        let part = group.part(case.tokens)?;
        let [q, k, v, weights] = case.whole(rt)?.map(|x| part.take(&x, 2).map(Var::new));
        let (program, [slopes, queries, keys]) = case.program(rt)?;
        let slopes = Var::leaf("slopes", slopes.value()?)?;
        let program = (&program, &[&slopes, &queries, &keys][..]);
        let options = ContextAttention { program: Some(program), ..Default::default() };
        let o = group.attention([&q?, &k?, &v?], options, "attention")?;
        let gradients = o.mul(&weights?)?.sum_all()?.backward()?;
        gradients.of(&slopes).expect("a gradient").to_f64s()
    };
    let one = Ranks::new(1).run(cpu, |comm| of(&comm, ContextExchange::AllGather)).unwrap().remove(0);
    for exchange in FORMS {
        let all = Ranks::new(3).run(cpu, |comm| of(&comm, exchange)).unwrap();
        for (k, want) in one.iter().enumerate() {
            let got: f64 = all.iter().map(|rank| rank[k]).sum();
            assert!((got - want).abs() < 1e-12, "{exchange:?}: head {k}: {got}, expected {want}");
        }
    }
}

#[test]
fn a_rank_that_sees_nothing_takes_part_in_backward() {
    for exchange in FORMS {
        let all = Ranks::new(2).run(cpu, |comm| {
            let rt = comm.runtime();
            let group = ContextRanks::group(&comm, exchange);
            let value = |seed| Var::leaf("x", Tensor::normal(rt, [1, 4, 4, 3], DType::F64, 0.0, 1.0, seed)?);
            let (q, k, v) = (value(1)?, value(2)?, value(3)?);
            // Hides all heads of the second rank, or all of its queries.
            let program = AttentionProgram::over(0).mask(|at, _| at.head.lt(2) & (at.query.lt(2) | at.query.ge(6)));
            let options = ContextAttention { program: Some((&program, &[])), ..Default::default() };
            let o = group.attention([&q, &k, &v], options, "attention")?;
            let gradients = o.square()?.sum_all()?.backward()?;
            [&q, &k, &v].map(|x| gradients.of(x).expect("a gradient").to_f64s()).into_iter().collect::<Result<Vec<_>>>()
        });
        let all = all.unwrap_or_else(|error| panic!("{exchange:?}: {error}"));
        assert!(all.iter().flatten().flatten().all(|g| g.is_finite()));
        assert!(all[0][0].iter().any(|g| *g != 0.0) && all[1][0].iter().all(|g| *g == 0.0), "{exchange:?}");
    }
}

#[test]
fn arguments_of_other_heads_are_refused_on_every_rank() {
    for exchange in FORMS {
        for shape in [[8, 1, 1], [4, 6, 1], [4, 1, 4]] {
            let errors = Ranks::new(2).run(cpu, |comm| {
                let rt = comm.runtime();
                let q = Var::new(Tensor::zeros(rt, [1, 4, 4, 8], DType::F32)?);
                let arg = Var::new(Tensor::zeros(rt, shape, DType::F32)?);
                let program = AttentionProgram::over(1).score(|s, _, args| s + args[0]);
                let options = ContextAttention { program: Some((&program, &[&arg])), ..Default::default() };
                Ok(ContextRanks::group(&comm, exchange)
                    .attention([&q, &q, &q], options, "a")
                    .err()
                    .map(|e| e.to_string()))
            });
            for error in errors.unwrap() {
                assert!(error.is_some_and(|e| e.contains("[1, 4, 8, 8]")), "{exchange:?} {shape:?}");
            }
        }
    }
}

#[test]
fn a_table_of_blocks_is_refused() {
    let refused = Ranks::new(2).run(cpu, |comm| {
        let q = Var::new(Tensor::zeros(comm.runtime(), [1, 2, 4, 8], DType::F32)?);
        let program = AttentionProgram::over(0).blocks(4, vec![0..8; 2]);
        let options = ContextAttention { program: Some((&program, &[])), ..Default::default() };
        ContextRanks::group(&comm, ContextExchange::AllGather).attention([&q, &q, &q], options, "a").map(drop)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("a table of blocks") && error.contains("leave it out"), "{error}");
}

#[test]
fn windows_caps_and_values_of_another_width() {
    for c in [2, 3, 4] {
        for exchange in FORMS {
            let case = ContextCase::new(exchange, c);
            for window in [0, 1, 3, 7, 100] {
                ContextCase { window: Some(window), ..case }.same(c, false, 1e-12);
            }
            for tokens in [4 * c, 5 * c] {
                let window = Some(5);
                ContextCase { tokens, window, segments: true, softcap: Some(1.5), ..case }.same(c, false, 1e-12);
            }
            ContextCase { segments: true, softcap: Some(1.5), ..case }.same(c, false, 1e-12);
            ContextCase { sizes: [1, 4 * c, 2 * c, 6, 3], ..case }.same(c, false, 1e-12);
        }
    }
}

#[test]
fn ranks_share_heads_of_keys_where_there_are_few() {
    for (c, heads) in [(2, [2, 1]), (4, [4, 2]), (4, [8, 1]), (3, [6, 1])] {
        for exchange in FORMS {
            let case = ContextCase::new(exchange, c);
            ContextCase { sizes: [2, heads[0], heads[1], 4, 4], ..case }.same(c, false, 1e-12);
        }
    }
}

#[test]
fn gradients_of_gradients_are_those_of_one_rank() {
    for c in [2, 3] {
        for exchange in [ContextExchange::AllGather, ContextExchange::Ulysses] {
            for (causal, segments) in [(true, false), (false, true)] {
                for tokens in [4 * c, 5 * c] {
                    ContextCase { causal, segments, tokens, ..ContextCase::new(exchange, c) }.same(c, true, 1e-11);
                }
            }
        }
    }
    let case = ContextCase::new(ContextExchange::Ring, 2);
    let error = Ranks::new(2).run(cpu, |comm| case.on(&comm, true)).unwrap_err().to_string();
    assert!(error.contains("cannot be differentiated twice") && error.contains("AllGather"), "{error}");
}

#[test]
fn narrower_types_stay_within_their_rounding() {
    for exchange in FORMS {
        for (dtype, close) in [(DType::F32, 1e-5), (DType::BF16, 3e-2)] {
            ContextCase { dtype, ..ContextCase::new(exchange, 3) }.same(3, false, close);
            ContextCase { dtype, segments: true, causal: false, ..ContextCase::new(exchange, 2) }.same(2, false, close);
            ContextCase { dtype, window: Some(3), ..ContextCase::new(exchange, 2) }.same(2, false, close);
        }
    }
}

/// Elements that a rank sends in forward, then in forward and backward.
fn sent(case: ContextCase, c: usize) -> [u64; 2] {
    let count = |backward: bool| {
        let counts = Ranks::new(c).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let comm: Comm<Cpu> = counting.clone();
            if backward {
                case.on(&comm, false)?;
            } else {
                let group = ContextRanks::group(&comm, case.exchange);
                let part = group.part(case.tokens)?;
                let [q, k, v, _] = case.whole(comm.runtime())?.map(|x| part.take(&x, 2).map(Var::new));
                let options = ContextAttention { causal: true, ..Default::default() };
                group.attention([&q?, &k?, &v?], options, "attention")?;
            }
            Ok(counting.total().sent)
        });
        let counts = counts.unwrap();
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        counts[0] / 8
    };
    [count(false), count(true)]
}

#[test]
fn ranks_send_what_the_formulas_say() {
    for c in WORLDS {
        let case = ContextCase::new(ContextExchange::AllGather, c);
        let [b, a, g, d, _] = case.sizes.map(|size| size as u64);
        let (ranks, tokens) = (c as u64, case.tokens as u64);
        let keys = (ranks - 1) * 2 * b * tokens * g * d / ranks;
        let heads = (ranks - 1) * b * tokens * d * (2 * a + 2 * g) / ranks / ranks;
        for (exchange, due) in [
            (ContextExchange::AllGather, [keys, 3 * keys]),
            (ContextExchange::Ring, [keys, 3 * keys]),
            (ContextExchange::Ulysses, [heads, 2 * heads]),
        ] {
            assert_eq!(sent(ContextCase { exchange, ..case }, c), due, "{exchange:?} {c} ranks");
        }
    }
    // Ulysses gives each rank a head of keys, also where there are fewer.
    let few = ContextCase { sizes: [2, 8, 1, 4, 4], ..ContextCase::new(ContextExchange::Ulysses, 4) };
    let heads = 3 * 2 * 16 * 4 * (2 * 8 + 2 * 4) / 16;
    assert_eq!(sent(few, 4), [heads, 2 * heads]);
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let refused = |f: &(dyn Fn(&Comm<Cpu>) -> Result<()> + Sync)| {
        Ranks::new(2).run(cpu, |comm| f(&comm)).unwrap_err().to_string()
    };
    let group = |comm: &Comm<Cpu>| ContextRanks::group(comm, ContextExchange::AllGather);
    let odd = refused(&|comm| group(comm).part(11).map(drop));
    assert!(odd.contains("11 tokens") && odd.contains("2 ranks") && odd.contains("pad them to 12"), "{odd}");
    let options = || ContextAttention { causal: true, ..Default::default() };
    let zeros = |comm: &Comm<Cpu>, dims: &[usize]| Tensor::zeros(comm.runtime(), dims, DType::F32).map(Var::new);
    let keys = refused(&|comm| {
        let (q, k) = (zeros(comm, &[1, 2, 4, 8])?, zeros(comm, &[1, 2, 8, 8])?);
        group(comm).attention([&q, &k, &k], options(), "a").map(drop)
    });
    assert!(keys.contains("same part of a sequence"), "{keys}");
    let segments = refused(&|comm| {
        let (q, of) = (zeros(comm, &[1, 2, 4, 8])?, Tensor::zeros(comm.runtime(), [1, 4], DType::I64)?);
        let of = Var::new(of);
        let options = ContextAttention { segments: Some(&of), ..options() };
        group(comm).attention([&q, &q, &q], options, "a").map(drop)
    });
    assert!(segments.contains("all 8 tokens"), "{segments}");
    let heads = refused(&|comm| {
        let group = ContextRanks::group(comm, ContextExchange::Ulysses);
        let (q, k) = (zeros(comm, &[1, 3, 4, 8])?, zeros(comm, &[1, 1, 4, 8])?);
        group.attention([&q, &k, &k], options(), "a").map(drop)
    });
    assert!(heads.contains("3 heads of queries and 1 of keys") && heads.contains("2 ranks"), "{heads}");
    for (causal, window) in [(false, (Some(2), None)), (false, (None, Some(1))), (true, (Some(2), Some(1)))] {
        let error = refused(&|comm| {
            let q = zeros(comm, &[1, 2, 4, 8])?;
            group(comm).attention([&q, &q, &q], ContextAttention { causal, window, ..options() }, "a").map(drop)
        });
        assert!(error.contains("is for causal attention") && error.contains("[1, 2, 4, 8]"), "{error}");
    }
}
