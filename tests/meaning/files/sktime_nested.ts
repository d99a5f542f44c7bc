@problemName sktime_nested
@timestamps false
@univariate true
@equalLength false
@classLabel true p q
@data
-0.97,-0.07,1.28,-1.11:p
-0.55,-0.94:q
0.65,0.53,0.3:p
