(** The executable model as OCaml, for the differential tests in tests/proofs. Natural numbers become native integers:
    part of the trusted base of the tests, not of the proofs. *)
From ODB Require Import Lists Types Grouping Packing Shards Drawing Alignment Layouts Runs Machine Local Rules System Told Instance Rest Resume Run Job Sizes PlanSettling PlanDivision PlanPadding Plan Weight Updates.
Require Import PeanoNat Extraction ExtrOcamlBasic ExtrOcamlNatInt ExtrOcamlZInt.

Extraction Language OCaml.
(** Those of natural numbers that ExtrOcamlNatInt leaves in unary: costs are large. *)
Extract Inlined Constant PeanoNat.Nat.add => "(+)".
Extract Inlined Constant PeanoNat.Nat.max => "Stdlib.max".
Extract Inlined Constant PeanoNat.Nat.min => "Stdlib.min".
Extract Inlined Constant PeanoNat.Nat.div => "(fun n m -> if m = 0 then 0 else n / m)".
Extraction "extracted/model.ml" shipped offered accepting compute_groups compute_rows gauge_of tokens_cost attention_cost form_in align_in odb_rule paper_rule target initial transition handle has_posted
  combine_offers reduce start perform rest_of save load zero_counts shares portion_shares portion_of first_of shared_window wish_for
  friendly_in compute_sized_groups sized_gauge
  handle_shared in_updates in_portions by_load draws deal_in_turn dealt_out first_wants shared_config post wish_of
  plan_of loaded q_of mean_scale sum_scale.
