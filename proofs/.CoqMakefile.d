Types.vo Types.glob Types.v.beautified Types.required_vo: Types.v 
Types.vio: Types.v 
Types.vos Types.vok Types.required_vos: Types.v 
Grouping.vo Grouping.glob Grouping.v.beautified Grouping.required_vo: Grouping.v Types.vo
Grouping.vio: Grouping.v Types.vio
Grouping.vos Grouping.vok Grouping.required_vos: Grouping.v Types.vos
Alignment.vo Alignment.glob Alignment.v.beautified Alignment.required_vo: Alignment.v Types.vo
Alignment.vio: Alignment.v Types.vio
Alignment.vos Alignment.vok Alignment.required_vos: Alignment.v Types.vos
Machine.vo Machine.glob Machine.v.beautified Machine.required_vo: Machine.v Types.vo Alignment.vo
Machine.vio: Machine.v Types.vio Alignment.vio
Machine.vos Machine.vok Machine.required_vos: Machine.v Types.vos Alignment.vos
Local.vo Local.glob Local.v.beautified Local.required_vo: Local.v Types.vo Alignment.vo Machine.vo
Local.vio: Local.v Types.vio Alignment.vio Machine.vio
Local.vos Local.vok Local.required_vos: Local.v Types.vos Alignment.vos Machine.vos
Rank.vo Rank.glob Rank.v.beautified Rank.required_vo: Rank.v Types.vo Alignment.vo Machine.vo Local.vo
Rank.vio: Rank.v Types.vio Alignment.vio Machine.vio Local.vio
Rank.vos Rank.vok Rank.required_vos: Rank.v Types.vos Alignment.vos Machine.vos Local.vos
System.vo System.glob System.v.beautified System.required_vo: System.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo
System.vio: System.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio
System.vos System.vok System.required_vos: System.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos
Facts.vo Facts.glob Facts.v.beautified Facts.required_vo: Facts.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo
Facts.vio: Facts.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio
Facts.vos Facts.vok Facts.required_vos: Facts.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos
Keeps.vo Keeps.glob Keeps.v.beautified Keeps.required_vo: Keeps.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo
Keeps.vio: Keeps.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio
Keeps.vos Keeps.vok Keeps.required_vos: Keeps.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos
Protocol.vo Protocol.glob Protocol.v.beautified Protocol.required_vo: Protocol.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo
Protocol.vio: Protocol.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio
Protocol.vos Protocol.vok Protocol.required_vos: Protocol.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos
Ending.vo Ending.glob Ending.v.beautified Ending.required_vo: Ending.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo Protocol.vo
Ending.vio: Ending.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio Protocol.vio
Ending.vos Ending.vok Ending.required_vos: Ending.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos Protocol.vos
Coupled.vo Coupled.glob Coupled.v.beautified Coupled.required_vo: Coupled.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo Protocol.vo Ending.vo
Coupled.vio: Coupled.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio Protocol.vio Ending.vio
Coupled.vos Coupled.vok Coupled.required_vos: Coupled.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos Protocol.vos Ending.vos
Termination.vo Termination.glob Termination.v.beautified Termination.required_vo: Termination.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo Protocol.vo Ending.vo Coupled.vo
Termination.vio: Termination.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio Protocol.vio Ending.vio Coupled.vio
Termination.vos Termination.vok Termination.required_vos: Termination.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos Protocol.vos Ending.vos Coupled.vos
Rounds.vo Rounds.glob Rounds.v.beautified Rounds.required_vo: Rounds.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo Protocol.vo Ending.vo Coupled.vo Termination.vo
Rounds.vio: Rounds.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio Protocol.vio Ending.vio Coupled.vio Termination.vio
Rounds.vos Rounds.vok Rounds.required_vos: Rounds.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos Protocol.vos Ending.vos Coupled.vos Termination.vos
Rules.vo Rules.glob Rules.v.beautified Rules.required_vo: Rules.v Types.vo Alignment.vo Machine.vo Local.vo
Rules.vio: Rules.v Types.vio Alignment.vio Machine.vio Local.vio
Rules.vos Rules.vok Rules.required_vos: Rules.v Types.vos Alignment.vos Machine.vos Local.vos
Instance.vo Instance.glob Instance.v.beautified Instance.required_vo: Instance.v Types.vo Grouping.vo Alignment.vo Machine.vo Local.vo Rules.vo System.vo Facts.vo Keeps.vo Protocol.vo Ending.vo Coupled.vo Termination.vo
Instance.vio: Instance.v Types.vio Grouping.vio Alignment.vio Machine.vio Local.vio Rules.vio System.vio Facts.vio Keeps.vio Protocol.vio Ending.vio Coupled.vio Termination.vio
Instance.vos Instance.vok Instance.required_vos: Instance.v Types.vos Grouping.vos Alignment.vos Machine.vos Local.vos Rules.vos System.vos Facts.vos Keeps.vos Protocol.vos Ending.vos Coupled.vos Termination.vos
Age.vo Age.glob Age.v.beautified Age.required_vo: Age.v Types.vo Alignment.vo Machine.vo Local.vo Rank.vo System.vo Facts.vo Keeps.vo Protocol.vo
Age.vio: Age.v Types.vio Alignment.vio Machine.vio Local.vio Rank.vio System.vio Facts.vio Keeps.vio Protocol.vio
Age.vos Age.vok Age.required_vos: Age.v Types.vos Alignment.vos Machine.vos Local.vos Rank.vos System.vos Facts.vos Keeps.vos Protocol.vos
Weight.vo Weight.glob Weight.v.beautified Weight.required_vo: Weight.v 
Weight.vio: Weight.v 
Weight.vos Weight.vok Weight.required_vos: Weight.v 
Extract.vo Extract.glob Extract.v.beautified Extract.required_vo: Extract.v Types.vo Grouping.vo Alignment.vo Machine.vo Local.vo Rules.vo System.vo Instance.vo
Extract.vio: Extract.v Types.vio Grouping.vio Alignment.vio Machine.vio Local.vio Rules.vio System.vio Instance.vio
Extract.vos Extract.vok Extract.required_vos: Extract.v Types.vos Grouping.vos Alignment.vos Machine.vos Local.vos Rules.vos System.vos Instance.vos
