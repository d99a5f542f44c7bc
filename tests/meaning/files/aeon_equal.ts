@problemName aeon_equal
@timestamps false
@missing False
@univariate false
@dimension 2
@equalLength true
@seriesLength 6
@classLabel true p q
@data
-0.38,1.52,-0.06,0.29,1.2,0.58:0.1,0.58,2.31,1.37,1.39,0.76:p
-0.99,0.08,0.5,-0.72,-1.02,-2.05:0.05,-0.28,1.6,1.86,0.8,0.78:q
0.43,0.49,0.78,1.25,3.07,3.2:-0.53,0.19,1.06,1.55,2.17,2.88:p
-0.92,-0.13,1.42,-0.04,1.05,2.43:-0.34,0.29,0.3,2.25,1.19,1.22:q
